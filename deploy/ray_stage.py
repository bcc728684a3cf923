"""The Ray actor that hosts one stage's gRPC server, on a thread and an event loop of its own.

Ray's methods serve placement and lifecycle alone; requests reach the stage over gRPC.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any

from deploy.errors import StageFailedError
from deploy.stages import Stage, build

_log = logging.getLogger(__name__)


class StageActor:
    """Serves a stage from its construction on.

    Ray restarts a lost actor by constructing it again, so everything happens there. A constructor that raises
    ends the actor for good, which is right for a stage that cannot be built.

    Args:
        name: The stage's name.
        stage: What to serve, and where.
    """

    def __init__(self, name: str, stage: Stage) -> None:
        server = build(name, stage)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stage", daemon=True).start()
        self._server = server
        try:
            self._address = self._run(server.start(stage.listen))
        except OSError as error:
            raise StageFailedError(str(error)) from error

    def address(self) -> str:
        """Where the stage listens."""
        return str(self._address)

    def ping(self) -> int:
        """The process it runs in."""
        return os.getpid()

    def outlive(self) -> None:
        """Never returns: the call fails when the actor is lost, which tells the caller at once."""
        threading.Event().wait()

    def drain(self, grace: float) -> None:
        """Stops serving after giving live sessions `grace` seconds."""
        self._run(self._server.stop(grace))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
