"""Who places, starts and restarts the stages: one interface, with Ray or plain processes behind it.

It does not know what a stage computes or who calls it.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import deploy
import stagespec
from deploy.config import Config, SupervisionSettings
from deploy.stages import NgramStage, Stage

Moved = Callable[[str, str, str], Awaitable[None]]
"""Told that a stage was restarted: its name, the last address that was taken note of, its new address."""

T = TypeVar("T")


class Launcher(Protocol):
    """Starts stages and keeps them running."""

    async def start(self, stages: Mapping[str, Stage], moved: Moved) -> dict[str, str]:
        """Starts all stages at once.

        Args:
            stages: By name.
            moved: Called whenever a stage was lost and is serving again.

        Returns:
            Where each listens.

        Raises:
            StageFailedError: One did not start. Nothing is left running then.
        """

    async def stop(self, grace: float) -> None:
        """Ends every stage after giving its sessions `grace` seconds, and leaves no process behind."""


def new_launcher(config: Config) -> Launcher:
    """The launcher that the configuration names."""
    if config.launcher == "ray":
        from deploy.ray_launcher import RayLauncher

        return RayLauncher(config.supervision)
    from deploy.processes import ProcessLauncher

    return ProcessLauncher(config.supervision)


def stage_environment(stage: Stage) -> dict[str, str]:
    """Environment variables for the process of a stage, beside those it inherits."""
    roots = {str(Path(package.__path__[0]).parent): None for package in (deploy, stagespec)}
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {
        "PYTHONPATH": os.pathsep.join([*roots, *filter(None, inherited)]),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if isinstance(stage, NgramStage):
        threads, device = 1, "cpu"
    else:
        threads, device = stage.settings.num_threads or len(os.sched_getaffinity(0)), stage.settings.device
    # Ray would choose the number of threads by the cores reserved, and show every GPU to every stage.
    environment["OMP_NUM_THREADS"] = str(threads)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


async def all_at_once(work: Mapping[str, Coroutine[object, object, T]]) -> dict[str, T]:
    """Runs everything concurrently; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(each) for name, each in work.items()}
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}


class Restarts:
    """When a stage that was lost may be started again: exponential backoff with jitter, and a rate limit.

    Args:
        settings: Backoff and limit.
        clock: Seconds that only go forward.
    """

    def __init__(self, settings: SupervisionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._recent: list[float] = []

    def delay(self) -> float:
        """Books a restart and returns the seconds to wait before it."""
        now = self._clock()
        # Restarts a minute apart are no crash loop: the backoff starts over.
        self._recent = [moment for moment in self._recent if moment > now - 60.0]
        backoff = self._settings.backoff_s * 2.0 ** min(len(self._recent), 30)
        wait = min(backoff, self._settings.max_backoff_s) * random.uniform(0.5, 1.0)
        limit = self._settings.max_restarts_per_minute
        if len(self._recent) >= limit:
            wait = max(wait, self._recent[-limit] + 60.0 - now)
        self._recent.append(now + wait)
        return wait
