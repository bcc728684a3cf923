"""One run: what is not on record yet is measured unit by unit, and each result recorded.

It knows the order of things; how a figure is taken is in the modules of its part.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from deploy.bench.bench import Bench
from deploy.bench.child import ChildError
from deploy.bench.forward_part import FORWARD_PARTS, ForwardTimer, targets
from deploy.bench.machine import is_busy, measure_machine
from deploy.bench.plan import Unit, all_units, pending
from deploy.bench.progress import Progress
from deploy.bench.served_part import measure_unit, served
from deploy.bench.settings import PEER_SAMPLINGS


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
    if ("machine",) not in records:
        await measure_machine(bench)
    work = pending(all_units(bench.settings, len(bench.prompts)), records, bench.skipped)
    progress = Progress(bench.note, [unit.cost for unit in work])
    through_server = [unit for unit in work if unit.part not in FORWARD_PARTS]
    if through_server:
        async with served(bench, through_server) as everything:
            bench.note(f"{len(through_server)} generations, prefills and sets of sessions ...")
            await _measure_all(
                bench, through_server, progress, lambda unit: measure_unit(bench, everything, unit)
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
