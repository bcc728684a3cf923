"""A process of its own for whatever is measured in it: loaded once, asked a line at a time, idle in between.

It does not know what the process computes; `worker` is its other end.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from deploy.errors import SetupError
from deploy.launch import stage_environment
from deploy.stages import NgramStage, Stage

_COMMAND = (sys.executable, "-P", "-m", "deploy.bench.worker")
_LINE_BYTES = 1 << 26


class ChildError(SetupError):
    """A child process cannot do what it is there for; the text says why."""


class Child:
    """A running child. It ends with this process: it reads a pipe that only this process holds.

    Args:
        name: What it is called where it fails.
        process: Its process.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._last_words: deque[str] = deque(maxlen=4)
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, name: str, module: str, settings: Mapping[str, Any], like: Stage, timeout: float
    ) -> "Child":
        """Starts a process and waits until it has loaded what it needs.

        Args:
            name: What it is called where it fails.
            module: Module of `deploy.bench` whose `start` gives the actions.
            settings: Arguments of that `start`.
            like: Stage whose threads and devices it gets.
            timeout: Seconds to load.

        Raises:
            ChildError: It does not start; the text says why.
        """
        # A session of its own keeps the terminal's Ctrl-C away.
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | stage_environment(like),
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        child = cls(name, process)
        try:
            await asyncio.wait_for(child._exchange({"module": module, "settings": settings}), timeout)
        except TimeoutError:
            await child.stop()
            raise ChildError(f"{name} has not loaded after {timeout:g} seconds") from None
        except BaseException:
            await child.stop()
            raise
        return child

    @property
    def process_id(self) -> int:
        """Its id."""
        return self._process.pid

    async def ask(self, action: str, **arguments: Any) -> Any:
        """Has an action run and returns its result.

        Raises:
            ChildError: The action failed or the process ended; the text says how.
        """
        return await self._exchange({"action": action, "arguments": arguments})

    async def stop(self) -> None:
        """Ends the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._listener
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _exchange(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A process that is gone already has its end noticed below.
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            await self._listener
            words = "; its last words: " + " | ".join(self._last_words) if self._last_words else ""
            raise ChildError(f"{self._name} ended with code {code}{words}")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{self._name}: {reply['error']}")
        return reply["result"]

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._last_words.append(line.decode(errors="replace").rstrip())


def ask_once(module: str, action: str, arguments: Mapping[str, Any]) -> Any:
    """Starts a process for a single action of a module that needs no settings.

    Returns:
        The action's result.

    Raises:
        ChildError: It failed; the text says how.
    """
    requests = [{"module": module, "settings": {}}, {"action": action, "arguments": arguments}]
    done = subprocess.run(
        _COMMAND,
        input="".join(json.dumps(request) + "\n" for request in requests),
        env=os.environ | stage_environment(NgramStage("ngram")),
        capture_output=True,
        text=True,
        check=False,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    for reply in replies:
        if "error" in reply:
            raise ChildError(reply["error"])
    if len(replies) < len(requests):
        words = " | ".join(done.stderr.splitlines()[-4:])
        raise ChildError(f"{module} ended with code {done.returncode}; its last words: {words}")
    return replies[-1]["result"]
