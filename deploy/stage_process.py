"""The process of one stage, as the plain launcher starts it, and the serving of a stage by hand.

The first line of standard input says what to serve; the end of that input means that the launcher is gone.
The first line of standard output says where it is served, or why it is not.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from deploy import interrupts
from deploy.errors import SetupError
from deploy.stages import Stage, TaggedStage, build

if TYPE_CHECKING:
    from services.host import StageServer

_STAGE: TypeAdapter[Stage] = TypeAdapter(TaggedStage)


def describe(name: str, stage: Stage, grace: float) -> bytes:
    """The line that `main` reads: what to serve, and how long to drain when told to end."""
    content = {"name": name, "stage": _STAGE.dump_python(stage, mode="json"), "grace": grace}
    return json.dumps(content).encode() + b"\n"


async def serve_stage(
    server: "StageServer", listen: str, grace: float, announce: Callable[[str], None]
) -> None:
    """Serves a stage until SIGTERM or SIGINT, then drains it.

    Args:
        server: The stage. It is built before the event loop runs, where a signal ends the process at once.
        listen: Where to serve it.
        grace: Seconds for live sessions to end.
        announce: Told the address once it is served.

    Raises:
        OSError: The address cannot be used.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in interrupts.heeded((signal.SIGTERM, signal.SIGINT)):
        loop.add_signal_handler(number, ended.set)
    announce(await server.start(listen))
    await ended.wait()
    await server.stop(grace)


def main() -> int:
    """Runs one stage for the launcher at the other end of the pipes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not end up among the replies.
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_launcher, args=(sys.stdin.fileno(),), daemon=True).start()

    def reply(key: str, text: str) -> None:
        print(json.dumps({key: text}), file=replies, flush=True)

    try:
        stage = _STAGE.validate_python(request["stage"])
        server = build(request["name"], stage)
        asyncio.run(
            serve_stage(server, stage.listen, request["grace"], lambda address: reply("address", address))
        )
    except (SetupError, OSError) as error:
        reply("error", str(error))
        return 1
    return 0


def _die_with_launcher(pipe: int) -> None:
    # A launcher that was killed cannot tell anyone to stop; the end of its pipe can. Read below Python's own
    # buffers, whose lock this thread would still hold when the interpreter shuts down.
    while os.read(pipe, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
