"""`stagespec generate`: one generation, shown as it comes and coloured by who proposed each token."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import add_chain_length, add_server, load_config, positive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.client import Client
    from deploy.prompts import Prompt
    from stagespec.v1.generation_pb2 import Completion, GenerateRequest
    from stagespec.v1.pipeline_pb2 import GetPipelineResponse
    from stagespec.v1.verifier_pb2 import TokenLogprobs

SAMPLING_HELP = {
    "top_p": "the likeliest tokens that reach this probability",
    "min_p": "tokens with at least this share of the likeliest one's probability",
    "repetition_penalty": "above 1: tokens of the context become less likely",
    "frequency_penalty": "subtracted for each time a token was generated",
    "presence_penalty": "subtracted from every token that was generated",
}
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text",
        description="Continues a prompt through a running server, or through one that is started for it.",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("prompt", nargs="?", help="text to continue; without any prompt, standard input")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text to continue, UTF-8")
    prompt.add_argument("--chat", metavar="TEXT", help="what a user says, through the chat template")
    prompt.add_argument("--humaneval", type=int, metavar="N", help="HumanEval prompt number N, from 0")
    parser.add_argument(
        "--mode",
        choices=("off", "ngram", "draft", "staged", "chain"),
        default="staged",
        help="drafters to use; default: staged, all of the pipeline; chain: a draft model alone, a fixed "
        "number of tokens in a row",
    )
    add_chain_length(parser)
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="default: the server's, see its configuration"
    )
    parser.add_argument("--min-tokens", type=int, metavar="N", help="end tokens and stops wait for so many")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    for name in SAMPLING[1:-1]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=SAMPLING_HELP[name])
    parser.add_argument("--seed", type=int, metavar="N", help="default: the server draws one and shows it")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    parser.add_argument("--stop-token", action="append", default=[], type=int, metavar="ID", help="likewise")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens")
    parser.add_argument("--logprobs", type=int, metavar="N", help="log probabilities with N alternatives")
    parser.add_argument("--max-nodes", type=int, metavar="N", help="most nodes in a draft")
    parser.add_argument("--max-depth", type=int, metavar="N", help="most levels in a draft")
    parser.add_argument("--max-children", type=int, metavar="N", help="most children of one node; 1: a chain")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="by who proposed each token"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generates."""
    from deploy import interrupts

    return interrupts.run(_generate(args, _request(args)))


async def _generate(args: argparse.Namespace, request: "GenerateRequest") -> int:
    import contextlib
    import json

    from deploy.cli.output import note
    from deploy.client import CHAIN_LENGTH, Client, speculation
    from deploy.serve import running

    async with contextlib.AsyncExitStack() as stack:
        address = args.target
        if address is None:
            address = await stack.enter_async_context(running(load_config(args, listen="127.0.0.1:0"), note))
        client = await stack.enter_async_context(Client(address))
        pipeline = await client.get_pipeline()
        options = speculation(args.mode, pipeline, args.chain_length or CHAIN_LENGTH)
        options.MergeFrom(request.speculation)  # A limit that is given counts, whatever the mode is.
        request.speculation.CopyFrom(options)
        if args.json:
            print(json.dumps(await _collect(client, request)))
        else:
            await _show(client, request, pipeline, args.color)
    return 0


def _request(args: argparse.Namespace) -> "GenerateRequest":
    """The request that the arguments describe; what is not given stays unset."""
    request = _prompt(args).request()
    request.return_prompt_token_ids = True
    request.sampling.temperature = args.temperature
    for name in SAMPLING:
        _set(request.sampling, name, getattr(args, name))
    _set(request.stop, "max_tokens", args.max_tokens)
    _set(request.stop, "min_tokens", args.min_tokens)
    request.stop.strings.extend(args.stop)
    _extend(request.stop.token_ids, args.stop_token, "--stop-token")
    request.stop.ignore_eos = args.ignore_eos
    _set(request, "num_logprobs", args.logprobs)
    _set(request.speculation, "max_nodes", args.max_nodes)
    _set(request.speculation, "max_depth", args.max_depth)
    _set(request.speculation, "max_children", args.max_children)
    return request


def _prompt(args: argparse.Namespace) -> "Prompt":
    from deploy.errors import SetupError
    from deploy.prompts import Prompt, read_prompts

    if args.chat is not None:
        return Prompt(messages=(("user", args.chat),))
    if args.humaneval is not None:
        prompts = read_prompts(None, None)
        if not 0 <= args.humaneval < len(prompts):
            raise SetupError(f"--humaneval is {args.humaneval} and must be from 0 to {len(prompts) - 1}")
        return prompts[int(args.humaneval)]
    if args.prompt is not None:
        return Prompt(text=args.prompt)
    try:
        if args.prompt_file is not None:
            return Prompt(text=args.prompt_file.read_text(encoding="utf-8"))
        return Prompt(text=sys.stdin.read())
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{args.prompt_file or 'standard input'} cannot be read as text: {error}") from error


def _set(message: Any, name: str, value: Any) -> None:
    from deploy.errors import SetupError

    if value is None:
        return
    try:
        setattr(message, name, value)
    except ValueError as error:
        raise SetupError(f"--{name.replace('_', '-')} is {value}: {error}") from error


def _extend(field: Any, values: list[int], option: str) -> None:
    from deploy.errors import SetupError

    try:
        field.extend(values)
    except ValueError as error:
        raise SetupError(f"{option} is {values}: {error}") from error


async def _collect(client: "Client", request: "GenerateRequest") -> dict[str, Any]:
    """The whole generation as plain data."""
    from deploy.cli.output import plain
    from stagespec.v1.generation_pb2 import Completion, FinishReason

    token_ids: list[int] = []
    origins: list[str] = []
    logprobs: list[TokenLogprobs] = []
    text = ""
    async for event in client.generate(request):
        if isinstance(event, Completion):
            end = event
        else:
            token_ids += event.token_ids
            origins += event.origins
            logprobs += event.logprobs
            text += event.text
    stats = end.speculation
    speculation = plain(stats)
    speculation["histogram"] = speculation.pop("accepted_histogram")
    speculation["acceptance_length"] = len(token_ids) / stats.num_steps
    speculation["acceptance_rate"] = stats.num_accepted / stats.num_drafted if stats.num_drafted else None
    found = {
        "request_id": end.request_id,
        "prompt_token_ids": list(end.prompt_token_ids),
        "token_ids": token_ids,
        "origins": origins,
        "text": text,
        "finish_reason": FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "seed": end.seed,
        "usage": plain(end.usage),
        "speculation": speculation,
        "timing": plain(end.timings),
        "effective": plain(end.effective),
    }
    matched = end.WhichOneof("matched_stop")
    if matched is not None:
        found["matched_stop"] = getattr(end, matched)
    if request.HasField("num_logprobs"):
        found["logprobs"] = [plain(entry) for entry in logprobs]
    return found


async def _show(
    client: "Client", request: "GenerateRequest", pipeline: "GetPipelineResponse", color: str
) -> None:
    """Prints the text as it comes, then what it took."""
    from deploy.cli.output import Palette, table
    from stagespec.v1.generation_pb2 import CHUNK_GRANULARITY_TOKEN, Completion

    palette = Palette(
        [stage.name for stage in pipeline.drafters],
        enabled=color == "always" or (color == "auto" and sys.stdout.isatty()),
    )
    # Token by token, so that each piece of text has one origin.
    request.chunk_granularity = CHUNK_GRANULARITY_TOKEN
    logprobs: list[str] = []
    begun = False
    try:
        async for event in client.generate(request):
            if isinstance(event, Completion):
                end = event
                continue
            if not begun:
                # Not before the server has taken the request: an error should not stand behind a prompt.
                sys.stdout.write(request.text)
                begun = True
            sys.stdout.write(palette.paint(event.text, event.origins[-1] if event.origins else "target"))
            sys.stdout.flush()
            logprobs += [_logprob_line(event.token_ids[-1], event.text, entry) for entry in event.logprobs]
    finally:
        if begun:
            print("\n", flush=True)
    for line in logprobs:
        print(line)
    if palette.legend():
        print(palette.legend())
    for line in _summary(end):
        print(line)
    rows: list[tuple[str, ...]] = [
        ("drafter", "proposed", "accepted", "passes", "calls", "failures", "seconds")
    ]
    for drafter in end.speculation.drafters:
        counts = (drafter.num_proposed, drafter.num_accepted, drafter.num_passes, drafter.num_calls)
        waited = drafter.time.ToTimedelta().total_seconds()
        rows.append((drafter.name, *map(str, counts), str(drafter.num_failures), f"{waited:.2f}"))
    if len(rows) > 1:
        for line in table(rows):
            print(line)
    for drafter in end.speculation.drafters:
        if drafter.skip_reason:
            print(f"{drafter.name} was skipped in {drafter.num_skipped_steps} steps: {drafter.skip_reason}")


def _summary(end: "Completion") -> "Iterator[str]":
    from stagespec.rpc import seconds
    from stagespec.v1.generation_pb2 import FinishReason

    stats, timings = end.speculation, end.timings
    total, num_tokens = seconds(timings.total), end.usage.num_completion_tokens
    reason = FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower().replace("_", " ")
    yield (
        f"{num_tokens} tokens after a prompt of {end.usage.num_prompt_tokens} in {total:.2f} s "
        f"({num_tokens / total:.1f} tokens/s, the first after {seconds(timings.first_token):.2f} s); "
        f"ended by {reason}; seed {end.seed}"
    )
    rate = f"{stats.num_accepted / stats.num_drafted:.0%}" if stats.num_drafted else "none drafted"
    yield (
        f"{stats.num_steps} verify steps, {num_tokens / stats.num_steps:.2f} tokens a step; "
        f"{stats.num_accepted} of {stats.num_drafted} drafted tokens accepted ({rate}); "
        f"{seconds(timings.drafting):.2f} s drafting, {seconds(timings.verifying):.2f} s verifying"
    )


def _logprob_line(token_id: int, text: str, entry: "TokenLogprobs") -> str:
    tops = ", ".join(
        f"{token_id} {log_prob:.3f}"
        for token_id, log_prob in zip(entry.top_token_ids, entry.top_log_probs, strict=True)
    )
    return f"token {token_id} {text!r}: {entry.log_prob:.3f}" + (f" (likeliest: {tops})" if tops else "")
