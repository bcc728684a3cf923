"""`stagespec bench --check-exact`: every mode against plain decoding, and that against transformers."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.arguments import add_server, load_config, positive

if TYPE_CHECKING:
    from deploy.exactness import Difference, Report
    from stagespec.v1.generation_pb2 import SamplingOptions


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "bench",
        help="compare the modes of the pipeline",
        description="Runs prompts in the modes off, ngram, draft and staged, compares token by token, and "
        "at temperature 0 also with transformers on the same weights. Exits with 1 if they differ beyond "
        "rounding.",
    )
    parser.add_argument("--check-exact", action="store_true", required=True, help="compare tokens")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with `prompt` or `messages`; default: HumanEval",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="use the first N prompts only")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    parser.add_argument("--top-k", type=positive, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; default: 0")
    parser.add_argument(
        "--max-nodes", type=positive, nargs="+", default=[], metavar="N", help="also staged with these limits"
    )
    parser.add_argument("--concurrency", type=positive, default=1, metavar="N", help="requests at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares."""
    from deploy import interrupts

    return interrupts.run(_bench(args))


async def _bench(args: argparse.Namespace) -> int:
    import asyncio
    import contextlib
    import json

    from deploy.cli.output import note
    from deploy.client import Client
    from deploy.exactness import Report, Variant, collect, compare
    from deploy.model_libraries import quiet
    from deploy.prompts import read_prompts
    from deploy.serve import running

    prompts = read_prompts(args.prompts, args.limit)
    sampling = _sampling(args)
    variants = [Variant("off"), Variant("ngram"), Variant("draft"), Variant("staged")]
    variants += [Variant("staged", max_nodes) for max_nodes in args.max_nodes]
    report = Report(len(prompts))
    async with contextlib.AsyncExitStack() as stack:
        address = args.target
        if address is None:
            address = await stack.enter_async_context(running(load_config(args, listen="127.0.0.1:0"), note))
        client = await stack.enter_async_context(Client(address))
        model = (await client.get_pipeline()).verifier.info.model
        progress = _progress(note, "generations")
        outputs = await collect(
            client, prompts, variants, sampling, args.max_tokens, args.concurrency, report, progress
        )
    note("comparing with transformers ..." if args.temperature == 0 else "comparing ...")
    quiet()
    progress = _progress(note, "transformers")
    await asyncio.to_thread(compare, outputs, model, sampling, args.max_tokens, report, progress)
    if args.json:
        print(json.dumps(report.plain()))
    else:
        _show(report)
    return 1 if report.mismatches else 0


def _sampling(args: argparse.Namespace) -> "SamplingOptions":
    from stagespec.v1.generation_pb2 import SamplingOptions

    sampling = SamplingOptions(temperature=args.temperature, seed=args.seed)
    if args.top_k is not None:
        sampling.top_k = args.top_k
    if args.top_p is not None:
        sampling.top_p = args.top_p
    return sampling


def _progress(note: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    """Says every now and then how far it is and how long it will take."""
    begun = last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < 5.0 and done < total:
            return
        last = now
        left = (now - begun) / done * (total - done)
        note(f"  {what}: {done} of {total}, about {left:.0f} s left")

    return progress


def _show(report: "Report") -> None:
    from deploy.cli.output import table

    rows = [("variant", "tokens", "steps", "tokens/step", "accepted", "drafted", "draft passes", "tokens/s")]
    for name, tally in report.tallies.items():
        per_step = f"{tally.num_tokens / tally.num_steps:.2f}" if tally.num_steps else "-"
        counts = [tally.num_steps, tally.num_accepted, tally.num_drafted, tally.num_passes]
        steps, accepted, drafted, passes = (str(n) if tally.num_steps else "-" for n in counts)
        speed = f"{tally.num_tokens / tally.seconds:.1f}" if tally.seconds else "-"
        rows.append((name, str(tally.num_tokens), steps, per_step, accepted, drafted, passes, speed))
    for line in table(rows):
        print(line)
    for difference in report.differences:
        print(_line(difference))
    num_ties = len(report.differences) - len(report.mismatches)
    print(f"{report.num_prompts} prompts, {len(report.mismatches)} mismatches, {num_ties} ties")


def _line(difference: "Difference") -> str:
    kind = "tie" if difference.is_tie else "MISMATCH"
    where = f"prompt {difference.prompt}, {difference.variant}, token {difference.position}"
    margin = "no margin" if difference.margin is None else f"margin {difference.margin:.1e}"
    return f"{kind}: {where}: {difference.found} instead of {difference.expected}, {margin}"
