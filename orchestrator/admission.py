"""Who may run: so many requests at once, so many in the queue, first come first served.

It knows nothing of what requests do.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from stagespec.rpc import RpcError

_RETRY_S = 1.0

T = TypeVar("T")


class Place:
    """A request's right to run."""

    def __init__(self) -> None:
        self._withdrawn = False
        self._waiting: asyncio.Timeout | None = None

    async def hold(self, work: Awaitable[T]) -> T:
        """Waits for a part of the request's work for as long as the place is held.

        Raises:
            RpcError: UNAVAILABLE (DRAINING) if the place was withdrawn, which cancels the work.
        """
        # Cancelling the request's task instead might hit gRPC while it sends, and would lose the reason.
        try:
            async with asyncio.timeout(0.0 if self._withdrawn else None) as self._waiting:
                return await work
        except TimeoutError:
            if not self._withdrawn:
                raise
            raise _draining() from None
        finally:
            self._waiting = None

    def withdraw(self) -> None:
        """Ends the request that holds the place."""
        if self._waiting is not None and not self._withdrawn:
            self._waiting.reschedule(0.0)
        self._withdrawn = True


class Admission:
    """Hands out places.

    Args:
        max_running: Requests at the same time.
        max_waiting: Requests in the queue; more are refused.
        max_wait_s: Seconds in the queue, before a request is refused.

    Attributes:
        max_running: Requests at the same time. May be set before the first one.
    """

    def __init__(self, max_running: int, max_waiting: int, max_wait_s: float) -> None:
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._num_running = 0
        self._places: set[Place] = set()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """A place to run, held while the context is.

        Raises:
            RpcError: RESOURCE_EXHAUSTED (OVERLOADED) if the queue is full or the wait too long; UNAVAILABLE
                (DRAINING) if the server is about to stop.
        """
        await self._enter()
        place = Place()
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.discard(place)
            self._leave()

    def drain(self) -> None:
        """Takes nobody any more, and sends away who waits."""
        self._draining = True
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(_draining())

    def withdraw(self) -> None:
        """Ends every request that still runs, as draining does with those that wait."""
        for place in self._places:
            place.withdraw()

    async def wait_idle(self) -> None:
        """Waits until no request has a place."""
        await self._idle.wait()

    async def _enter(self) -> None:
        if self._draining:
            raise _draining()
        if self._num_running < self.max_running:
            self._take()
            return
        if len(self._queue) >= self._max_waiting:
            raise _overloaded(
                f"{self._num_running} requests run and {len(self._queue)} wait, which is the most"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            if turn in self._queue:
                self._queue.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # The place came just as the request gave up.
            if isinstance(error, TimeoutError):
                raise _overloaded(f"no place became free within {self._max_wait_s:g} s") from None
            raise

    def _take(self) -> None:
        self._num_running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_running -= 1
        while self._queue and self._num_running < self.max_running:
            turn = self._queue.popleft()
            if not turn.done():
                self._take()
                turn.set_result(None)
        if self._num_running == 0:
            self._idle.set()


def _overloaded(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", message, retry_after=_RETRY_S)


def _draining() -> RpcError:
    return RpcError(
        grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is about to stop", retry_after=_RETRY_S
    )
