"""The machine under the run: its limits, and whether it is as idle as it should be."""

import asyncio
import os
from collections.abc import Iterable

from deploy.bench.bench import Bench
from deploy.bench.child import Child
from deploy.bench.processes import machine_seconds, processor_name, processor_seconds
from deploy.bench.ways import Runner

_WATCH_S = 1.0
_BUSY_CORES = 0.1


async def measure_machine(bench: Bench) -> None:
    """Records the machine's limits, while nothing of the run is running.

    If they have been taken before, the better ones count: a machine is never faster than its limits, and one
    that others use seems slower.

    Raises:
        SetupError: They cannot be measured.
    """
    before = bench.records.get(("machine",))
    busy = await _busy_cores()
    if is_busy(busy):
        bench.note(f"the machine is not idle: something uses {busy:.1f} cores, and figures will suffer")
    bench.note("measuring the machine's limits ...")
    _, stage = bench.config.target
    num_threads = stage.settings.num_threads or len(os.sched_getaffinity(0))
    child = await Child.start("machine", "machine_worker", {"num_threads": num_threads}, stage, bench.timeout)
    try:
        limits = await child.ask("measure")
    finally:
        await child.stop()
    if before is not None:
        limits = {name: max(value, before[name]) for name, value in limits.items()}
    entry = {"processor": processor_name(), "num_threads": num_threads, "busy_cores": busy, **limits}
    bench.records.add(("machine",), entry)
    bench.note(f"it reads {limits['read_bytes_per_s'] / 1e9:.1f} GB/s")
    bench.note(f"it computes {limits['flops'] / 1e9:.0f} GFLOP/s in float32, with {num_threads} threads")


async def watch_idle(bench: Bench, runners: Iterable[Runner]) -> None:
    """Looks for processes that spin while they have nothing to do, which would slow the others down."""
    processes = {name: number for runner in runners for name, number in runner.processes().items()}
    before = {name: processor_seconds(number) for name, number in processes.items()}
    busy = await _busy_cores()
    shares = {
        name: (processor_seconds(number) - before[name]) / _WATCH_S for name, number in processes.items()
    }
    for name, share in shares.items():
        if is_busy(share):
            bench.note(f"{name} uses {share:.1f} cores while it is idle, and figures will suffer")
    bench.records.add(("idle",), {"busy_cores": busy, "processes": shares})


def is_busy(cores: float) -> bool:
    """Whether so many cores in use disturb a measurement."""
    return cores > _BUSY_CORES


async def _busy_cores() -> float:
    """Cores in use, by all processes of the machine."""
    before = machine_seconds()
    await asyncio.sleep(_WATCH_S)
    return (machine_seconds() - before) / _WATCH_S
