"""Runs asynchronous work so that every way of ending it goes through its clean-up."""

import asyncio
import signal
from collections.abc import Coroutine, Iterable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded(numbers: Iterable[signal.Signals] = _SIGNALS) -> list[signal.Signals]:
    """Those of the signals that whoever started this process did not tell it to ignore, as nohup does."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def run(work: Coroutine[Any, Any, int], *, interrupted: int | None = None) -> int:
    """Runs `work` to its end. SIGINT, SIGTERM and SIGHUP cancel it; another one cancels its clean-up too.

    A signal that the process was started to ignore stays ignored.

    Args:
        work: Returns an exit code.
        interrupted: Exit code after a signal; None for 128 plus its number, as shells have it.

    Returns:
        The exit code.
    """
    received: list[signal.Signals] = []

    async def main() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in heeded():
            loop.add_signal_handler(number, interrupt, number)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        return 128 + received[0] if interrupted is None else interrupted
    except KeyboardInterrupt:  # before there were handlers
        return 128 + signal.SIGINT if interrupted is None else interrupted
    finally:
        work.close()  # in case it never began
