"""The launcher that needs nothing but the operating system: one child process a stage."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.config import SupervisionSettings
from deploy.errors import StageFailedError
from deploy.launch import Moved, Restarts, all_at_once, stage_environment
from deploy.stage_process import describe
from deploy.stages import Stage

_log = logging.getLogger(__name__)

_NUM_LAST_WORDS = 8
_MARGIN_S = 2.0


@dataclass(slots=True, eq=False)
class _Child:
    """A running stage.

    Attributes:
        process: Its process.
        last_words: The last lines it wrote to standard error.
        listener: Reads them.
    """

    process: asyncio.subprocess.Process
    last_words: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_LAST_WORDS))
    listener: asyncio.Task[None] | None = None


class ProcessLauncher:
    """Starts stages as child processes and restarts those that end.

    A child ends when this process does, however that happens: it watches a pipe that only this process holds.

    Args:
        settings: Time-outs and restart limits.
    """

    def __init__(self, settings: SupervisionSettings) -> None:
        self._settings = settings
        self._children: dict[str, _Child] = {}
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, stages: Mapping[str, Stage], moved: Moved) -> dict[str, str]:
        """See `Launcher.start`."""
        try:
            addresses = await all_at_once({name: self._spawn(name, stage) for name, stage in stages.items()})
        except BaseException:
            await self.stop(0.0)
            raise
        self._watchers = [
            asyncio.create_task(self._watch(name, stage, addresses[name], moved))
            for name, stage in stages.items()
        ]
        return addresses

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        await asyncio.gather(*(_end(child, grace) for child in self._children.values()))
        self._children = {}

    async def _spawn(self, name: str, stage: Stage) -> str:
        """Starts a stage and waits until it listens.

        Returns:
            Its address.

        Raises:
            StageFailedError: It ended, said that it cannot serve, or took too long.
        """
        # A session of its own keeps the terminal's Ctrl-C away: the launcher decides when a stage ends.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "deploy.stage_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | stage_environment(stage),
            start_new_session=True,
        )
        child = self._children[name] = _Child(process)
        child.listener = asyncio.create_task(_listen(name, child))
        assert process.stdin is not None
        assert process.stdout is not None
        # A child that is gone already has its end noticed below.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(describe(name, stage, self._settings.drain_s))
            await process.stdin.drain()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), self._settings.start_timeout_s)
        except TimeoutError:
            await _end(child, 0.0)
            text = f"stage {name} does not listen after supervision.start_timeout_s = "
            text += f"{self._settings.start_timeout_s:g} seconds"
            raise StageFailedError(text + _quote(child)) from None
        reply = json.loads(line) if line else {}
        if "address" in reply:
            _log.info("stage %s: process %d listens on %s", name, process.pid, reply["address"])
            return str(reply["address"])
        code = await process.wait()
        await child.listener
        raise StageFailedError(
            reply.get("error") or f"stage {name} ended with code {code} before it served{_quote(child)}"
        )

    async def _watch(self, name: str, stage: Stage, known: str, moved: Moved) -> None:
        restarts = Restarts(self._settings)
        while True:
            code = await self._children[name].process.wait()
            _log.warning("stage %s ended with code %d%s", name, code, _quote(self._children[name]))
            address = None
            while address is None:
                delay = restarts.delay()
                _log.warning("stage %s: starting again in %.1f s", name, delay)
                await asyncio.sleep(delay)
                try:
                    address = await self._spawn(name, stage)
                except StageFailedError as error:
                    _log.error("%s", error)
            try:
                await moved(name, known, address)
                known = address
            except Exception as error:
                _log.error("stage %s at %s is not used: %s", name, address, error)


async def _listen(name: str, child: _Child) -> None:
    assert child.process.stderr is not None
    while True:
        try:
            line = await child.process.stderr.readline()
        except ValueError:  # longer than the reader's buffer, which is empty again now
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        child.last_words.append(text)
        _log.info("stage %s: %s", name, text)


async def _end(child: _Child, grace: float) -> None:
    process = child.process
    try:
        # It drains on SIGTERM; without grace there is nothing to wait for.
        if process.returncode is None and grace > 0:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace + _MARGIN_S)
    finally:
        if process.returncode is None:
            process.kill()
    await process.wait()
    if child.listener is not None:
        await child.listener
    if process.stdin is not None:
        process.stdin.close()


def _quote(child: _Child) -> str:
    return "; its last words: " + " | ".join(child.last_words) if child.last_words else ""
