"""`stagespec bench --check-exact`: every mode against plain decoding, and that against transformers."""

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from deploy.cli.arguments import load_config

if TYPE_CHECKING:
    from deploy.config import Config
    from deploy.exactness import Difference, Report
    from stagespec.v1.generation_pb2 import SamplingOptions


async def check(args: argparse.Namespace) -> int:
    """Compares tokens and prints the outcome.

    Args:
        args: As `deploy.cli.bench` parses them.

    Returns:
        The exit code: 1 if something differs beyond rounding.

    Raises:
        SetupError: A server does not start or answer, or a mode lacks its drafter.
        RpcError: The server refused or failed.
    """
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
    variants += [Variant("staged", max_nodes) for max_nodes in args.max_nodes or ()]
    report = Report(len(prompts))
    async with contextlib.AsyncExitStack() as stack:
        address = args.target
        if address is None:
            address = await stack.enter_async_context(running(_config(args), note))
        client = await stack.enter_async_context(Client(address))
        served = (await client.get_pipeline()).verifier.info
        progress = _progress(note, "generations")
        concurrency = args.concurrency or 1
        outputs = await collect(
            client, prompts, variants, sampling, args.max_tokens, concurrency, report, progress
        )
    note("comparing with transformers ..." if sampling.temperature == 0 else "comparing ...")
    quiet()
    progress = _progress(note, "transformers")
    await asyncio.to_thread(
        compare,
        outputs,
        served,
        sampling,
        args.max_tokens,
        report,
        progress,
    )
    if args.json:
        print(json.dumps(report.plain()))
    else:
        _show(report)
    return 1 if report.mismatches else 0


def _config(args: argparse.Namespace) -> "Config":
    """The configuration to run, with the weight format and the kernel of the command line.

    Raises:
        SetupError: It is wrong, or there are several of them.
    """
    from deploy.bench.served import with_variant
    from deploy.bench.settings import Variant
    from deploy.errors import SetupError

    chosen = []
    for name in ("weight_format", "kernel"):
        values = getattr(args, name) or (None,)
        if len(values) > 1:
            raise SetupError(f"--{name.replace('_', '-')}: tokens are compared with one at a time")
        chosen.append(values[0])
    return with_variant(load_config(args, listen="127.0.0.1:0"), Variant(*chosen))


def _sampling(args: argparse.Namespace) -> "SamplingOptions":
    from stagespec.v1.generation_pb2 import SamplingOptions

    sampling = SamplingOptions(temperature=args.temperature or 0.0, seed=args.seed or 0)
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
