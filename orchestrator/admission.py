"""Who may run: so many requests and so many tokens at once, so many in the queue, first come first served.

It knows nothing of what requests do.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request in the queue: told when it may run, and how many tokens it holds then."""

    turn: "asyncio.Future[None]"
    num_tokens: int


class Admission:
    """Hands out places.

    Args:
        max_running: Requests at the same time.
        max_waiting: Requests in the queue; more are refused.
        max_wait_s: Seconds in the queue, before a request is refused.
        max_tokens: Says how many tokens the requests that run may hold together; 0 for no limit.

    Attributes:
        max_running: Requests at the same time. May be set before the first one.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        max_wait_s: float,
        max_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        self.max_running = max_running
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._num_running = 0
        self._num_tokens = 0
        self._places: set[Place] = set()
        self._queue: deque[_Waiting] = deque()
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
    async def place(self, num_tokens: int = 0) -> AsyncIterator[Place]:
        """A place to run, held while the context is.

        Args:
            num_tokens: Tokens that the request holds at most while it runs. With more than the limit it runs
                alone.

        Raises:
            RpcError: RESOURCE_EXHAUSTED (OVERLOADED) if the queue is full or the wait too long; UNAVAILABLE
                (DRAINING) if the server is about to stop.
        """
        await self._enter(num_tokens)
        place = Place()
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.discard(place)
            self._leave(num_tokens)

    def drain(self) -> None:
        """Takes nobody any more, and sends away who waits."""
        self._draining = True
        while self._queue:
            turn = self._queue.popleft().turn
            if not turn.done():
                turn.set_exception(_draining())

    def withdraw(self) -> None:
        """Ends every request that still runs, as draining does with those that wait."""
        for place in self._places:
            place.withdraw()

    async def wait_idle(self) -> None:
        """Waits until no request has a place."""
        await self._idle.wait()

    async def _enter(self, num_tokens: int) -> None:
        if self._draining:
            raise _draining()
        if not self._queue and self._has_room(num_tokens):
            self._take(num_tokens)
            return
        if len(self._queue) >= self._max_waiting:
            raise _overloaded(
                f"{self._num_running} requests run and {len(self._queue)} wait, which is the most"
            )
        waiting = _Waiting(asyncio.get_running_loop().create_future(), num_tokens)
        self._queue.append(waiting)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.turn
        except BaseException as error:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._let_in()  # It may have held up smaller ones.
            elif _was_let_in(waiting.turn):
                self._leave(num_tokens)  # The place came just as the request gave up.
            if isinstance(error, TimeoutError):
                raise _overloaded(f"no place became free within {self._max_wait_s:g} s") from None
            raise

    def _has_room(self, num_tokens: int) -> bool:
        if self._num_running >= self.max_running:
            return False
        limit = self._max_tokens()
        return limit <= 0 or self._num_running == 0 or self._num_tokens + num_tokens <= limit

    def _take(self, num_tokens: int) -> None:
        self._num_running += 1
        self._num_tokens += num_tokens
        self._idle.clear()

    def _leave(self, num_tokens: int) -> None:
        self._num_running -= 1
        self._num_tokens -= num_tokens
        self._let_in()
        if self._num_running == 0:
            self._idle.set()

    def _let_in(self) -> None:
        while self._queue and self._has_room(self._queue[0].num_tokens):
            waiting = self._queue.popleft()
            if not waiting.turn.done():
                self._take(waiting.num_tokens)
                waiting.turn.set_result(None)


def _was_let_in(turn: "asyncio.Future[None]") -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None


def _overloaded(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", message, retry_after=_RETRY_S)


def _draining() -> RpcError:
    return RpcError(
        grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is about to stop", retry_after=_RETRY_S
    )
