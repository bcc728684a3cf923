"""The launcher that lets Ray place, start and restart the stages, on a local cluster of its own."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from deploy.config import SupervisionSettings
from deploy.errors import StageFailedError
from deploy.launch import Moved, Restarts, all_at_once, stage_environment
from deploy.ray_stage import StageActor
from deploy.stages import Stage

_log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 * 1024 * 1024
_RESTARTS_BY_RAY = 3
_MARGIN_S = 2.0


class RayLauncher:
    """Starts every stage as an actor. The cluster belongs to this process and ends with it.

    Ray restarts a lost actor at once and without backoff, so it may do so only a few times; after that, and
    when an actor's constructor fails, a new actor is made under the same limits as plain processes.

    Args:
        settings: Time-outs and restart limits.
    """

    def __init__(self, settings: SupervisionSettings) -> None:
        self._settings = settings
        self._actors: dict[str, Any] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._folder: str | None = None
        self._group: Any = None

    async def start(self, stages: Mapping[str, Stage], moved: Moved) -> dict[str, str]:
        """See `Launcher.start`."""
        try:
            await self._start_cluster()
            await self._reserve(stages)
            addresses = await all_at_once(
                {name: self._create(index, name, stage) for index, (name, stage) in enumerate(stages.items())}
            )
        except BaseException:
            await self.stop(0.0)
            raise
        self._watchers = [
            asyncio.create_task(self._watch(index, name, stage, addresses[name], moved))
            for index, (name, stage) in enumerate(stages.items())
        ]
        return addresses

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`."""
        import ray

        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        try:
            # Neither ray.kill nor ray.shutdown gives an actor a chance to end what it is doing.
            if grace > 0 and self._actors:
                drains = [_wait(actor.drain.remote(grace)) for actor in self._actors.values()]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.gather(*drains, return_exceptions=True), grace + _MARGIN_S)
        finally:
            self._actors = {}
            ray.shutdown()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    async def _start_cluster(self) -> None:
        # Anyone who reaches Ray's ports can run code here: they are on loopback and want a token.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray runs its workers at low priority, where anything else on the machine starves them.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so Ray spells it
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray

        # Short, because Ray keeps sockets in it, whose paths are limited to 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="stagespec-")
        starting = asyncio.ensure_future(
            # In a thread, since it takes seconds, and so that Ray does not set Python's signal handlers.
            asyncio.to_thread(
                ray.init,
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=self._folder,
            )
        )
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # What is half started can be stopped only once it has started.
            await asyncio.wait([starting])
            raise
        finally:
            _take_back_signals()

    async def _reserve(self, stages: Mapping[str, Stage]) -> None:
        """Reserves room for all stages.

        Raises:
            StageFailedError: There is not enough; the text says of what.
        """
        import ray

        wanted = {
            "CPU": {name: stage.ray.num_cpus for name, stage in stages.items()},
            "GPU": {name: stage.ray.num_gpus for name, stage in stages.items()},
        }
        there = ray.cluster_resources()
        for resource, by_stage in wanted.items():
            total, has = sum(by_stage.values()), there.get(resource, 0.0)
            if total > has + 1e-9:
                shares = ", ".join(f"{name} {share:g}" for name, share in by_stage.items() if share)
                raise StageFailedError(
                    f"Ray has no room for the stages: they reserve {total:g} {resource} ({shares}) and "
                    f"there is {has:g}; lower ray.num_{resource.lower()}s of a stage, "
                    "or use `launcher: process`"
                )
        bundles = [
            {"CPU": stage.ray.num_cpus} | ({"GPU": stage.ray.num_gpus} if stage.ray.num_gpus else {})
            for stage in stages.values()
        ]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            await _wait(self._group.ready(), self._settings.placement_timeout_s)
        except TimeoutError:
            raise StageFailedError(
                f"Ray found no room for {bundles} within supervision.placement_timeout_s = "
                f"{self._settings.placement_timeout_s:g} seconds; it has {ray.available_resources()} to give"
            ) from None

    async def _create(self, index: int, name: str, stage: Stage) -> str:
        """Makes the actor of a stage and waits until it listens.

        Returns:
            Its address.

        Raises:
            StageFailedError: It ended, said that it cannot serve, or took too long.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(StageActor).options(
            num_cpus=stage.ray.num_cpus,
            num_gpus=stage.ray.num_gpus,
            max_restarts=_RESTARTS_BY_RAY,
            max_concurrency=4,
            runtime_env={"env_vars": stage_environment(stage)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        )
        actor = self._actors[name] = actor_class.remote(name, stage)
        address = await self._address(name, actor)
        _log.info("stage %s: actor listens on %s", name, address)
        return address

    async def _address(self, name: str, actor: Any) -> str:
        import ray

        try:
            return str(await _wait(actor.address.remote(), self._settings.start_timeout_s))
        except TimeoutError:
            ray.kill(actor)
            raise StageFailedError(
                f"stage {name} does not listen after supervision.start_timeout_s = "
                f"{self._settings.start_timeout_s:g} seconds"
            ) from None
        except ray.exceptions.RayError as error:
            raise StageFailedError(_last_words(name, error)) from None

    async def _watch(self, index: int, name: str, stage: Stage, known: str, moved: Moved) -> None:
        import ray

        restarts = Restarts(self._settings)
        while True:
            try:
                await _wait(self._actors[name].outlive.remote())
            except ray.exceptions.RayError as error:
                _log.warning("stage %s was lost: %s", name, type(error).__name__)
            address = None
            with contextlib.suppress(StageFailedError):
                address = await self._address(name, self._actors[name])
            while address is None:
                delay = restarts.delay()
                _log.warning("stage %s: Ray gave it up; making a new actor in %.1f s", name, delay)
                await asyncio.sleep(delay)
                try:
                    address = await self._create(index, name, stage)
                except StageFailedError as error:
                    _log.error("%s", error)
            try:
                await moved(name, known, address)
                known = address
            except Exception as error:
                _log.error("stage %s at %s is not used: %s", name, address, error)


def _take_back_signals() -> None:
    """Undoes what Ray's core did to SIGTERM: its handler prints a stack and ends the process undrained."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Python does not know that the handler it holds is no longer in force.
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


async def _wait(reference: Any, timeout: float | None = None) -> Any:
    """The value behind a Ray reference."""
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout)


def _last_words(name: str, error: Exception) -> str:
    # Ray sends the constructor's exception as the text of a traceback.
    found = re.findall(r"StageFailedError: (.*)", str(error))
    return found[-1] if found else f"stage {name} was lost while it started: {' '.join(str(error).split())}"
