"""One run: what is not on record yet is measured unit by unit, and each result recorded.

It knows the order of things; how a figure is taken is in the modules of its part.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from deploy.bench.bench import Bench
from deploy.bench.child import ChildError
from deploy.bench.forward_part import FORWARD_PARTS, ForwardTimer, targets
from deploy.bench.machine import is_busy, measure_machine
from deploy.bench.plan import Unit, all_units, pending
from deploy.bench.progress import Progress
from deploy.bench.served_part import measure_unit, served
from deploy.bench.settings import PEER_SAMPLINGS, TIMED_PARTS
from deploy.bench.speculation_part import count_unit


async def measure(bench: Bench) -> None:
    """Measures whatever is not on record yet.

    Raises:
        SetupError: Something that was asked for cannot be started.
        RpcError: The server refused or failed.
    """
    records = bench.records
    for (what,), entry in records.of("skipped").items():
        bench.skipped[str(what)] = entry["reason"]
        bench.note(f"left out as when this run began: {what}: {entry['reason']}")
    if bench.settings.peers:
        for sampling in sorted(set(bench.settings.samplings) - set(PEER_SAMPLINGS)):
            bench.skip(f"peers, {sampling}", "they would draw other tokens")
    if ("machine",) not in records and set(bench.settings.parts) & set(TIMED_PARTS):
        await measure_machine(bench)
    work = pending(all_units(bench.settings, len(bench.prompts)), records, bench.skipped)
    progress = Progress(bench.note, [unit.cost for unit in work])
    through_server = [unit for unit in work if unit.part not in FORWARD_PARTS]
    if through_server:
        timed = [unit for unit in through_server if unit.part in TIMED_PARTS]
        counted = [unit for unit in through_server if unit.part not in TIMED_PARTS]
        async with served(bench, through_server) as everything:
            if timed:
                bench.note(f"{len(timed)} generations, prefills and sets of sessions ...")
                await _measure_all(bench, timed, progress, lambda unit: measure_unit(bench, everything, unit))
            if counted:
                at_once = min(bench.concurrency, everything.max_requests)
                bench.note(f"{len(counted)} generations to count drafts, {at_once} at once ...")
                await _count_all(
                    bench,
                    counted,
                    progress,
                    lambda unit: count_unit(bench.settings, everything, unit),
                    at_once,
                )
    forward = [unit for unit in work if unit.part in FORWARD_PARTS]
    if forward:
        async with targets(bench, forward) as children:
            bench.note(f"{len(forward)} figures of the target's forward pass ...")
            await _measure_all(bench, forward, progress, ForwardTimer(children, bench.prompts).take)
    machine = records.get(("machine",))
    if work and machine is not None and is_busy(machine["busy_cores"]):
        await measure_machine(bench)


async def _measure_all(
    bench: Bench, units: Sequence[Unit], progress: Progress, take: Callable[[Unit], Awaitable[dict[str, Any]]]
) -> None:
    for unit in units:
        if bench.skips(unit):
            progress.drop(unit.cost)
            continue
        progress.begin()
        try:
            entry = await take(unit)
        except ChildError as error:
            if unit.subject not in bench.settings.peers:
                raise
            bench.skip(unit.subject, str(error))
            progress.drop(unit.cost)
            continue
        bench.records.add(unit.key, entry)
        progress.done(unit.cost)


async def _count_all(
    bench: Bench,
    units: Sequence[Unit],
    progress: Progress,
    take: Callable[[Unit], Awaitable[dict[str, Any]]],
    at_once: int,
) -> None:
    """Takes units several at a time; what one takes is not measured."""
    left = iter(units)

    async def work() -> None:
        for unit in left:
            if bench.skips(unit):
                progress.drop(unit.cost)
                continue
            bench.records.add(unit.key, await take(unit))
            progress.done(unit.cost)
            progress.begin()

    progress.begin()
    workers = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
