"""One stream between one request and one stage: ask a question, get its answer, whatever happened before.

The stream brings the stage's context up to date by deltas, tells overdue answers from present ones, and opens
itself anew after a failure. What is asked, and what a failure means for the request, is not known here.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from orchestrator.backoff import Backoff
from stagespec.rpc import RpcError, describe
from stagespec.v1.context_pb2 import ContextDelta


class Reply(Protocol):
    """What every message from a stage has: an echo, and perhaps the wish for more of the context."""

    epoch: int
    resync_from: int

    def HasField(self, field_name: Literal["resync_from"]) -> bool:  # noqa: N802
        """Whether the field is set."""


RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT", bound=Reply)


@dataclass(eq=False)
class StageError(Exception):
    """The stage gave no answer.

    Attributes:
        reason: Why, in a few words.
        status: What the stage said instead, if it ended the stream with an error.
        overdue: Whether the answer may still come.
    """

    reason: str
    status: RpcError | None = None
    overdue: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a stream waits, in seconds.

    Attributes:
        answer_s: For an answer, when the stage's context is up to date.
        per_token_s: More for each context token that the stage has yet to read.
        overdue_s: For an overdue answer, before the stream is given up.
        backoff: Before a failed stream is opened anew.
    """

    answer_s: float
    per_token_s: float
    overdue_s: float
    backoff: Backoff


@dataclass(frozen=True, slots=True)
class Question(Generic[RequestT, ReplyT]):
    """A request that is complete but for what the stream fills in.

    Attributes:
        context: The request's whole context. It may grow at its end, and changes in no other way.
        key: What tells this question from others: the step and, for drafters, the round.
        fill: Makes the request from the context delta and the epoch.
        key_of: What a reply echoes of `key`.
        is_last: Whether a reply is the last one to its question.
    """

    context: Sequence[int]
    key: tuple[int, ...]
    fill: Callable[[ContextDelta, int], RequestT]
    key_of: Callable[[ReplyT], tuple[int, ...]]
    is_last: Callable[[ReplyT], bool]


class StageStream(Generic[RequestT, ReplyT]):
    """A stream that is opened when there is something to ask, and anew after it failed.

    One question is under way at a time. While its answer is overdue the stream is `blocked`, so that nothing
    piles up at a slow stage; when the answer comes after all, it is dropped, but the context that went with
    its question is known to the stage from then on.

    Args:
        open_call: Opens a call at the stage's present address.
        session_id: Names the request at the stage.
        patience: How long to wait.
    """

    def __init__(
        self,
        open_call: Callable[[], "grpc.aio.StreamStreamCall[RequestT, ReplyT]"],
        session_id: str,
        patience: Patience,
    ) -> None:
        self._open_call = open_call
        self._session_id = session_id
        self._patience = patience
        self._call: grpc.aio.StreamStreamCall[RequestT, ReplyT] | None = None
        self._exchange: asyncio.Task[list[ReplyT]] | None = None
        self._epoch = -1
        self._known_length = 0  # of the context, at the stage
        self._due_at = 0.0
        self._num_failures = 0
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the stage holds a session for this stream."""
        return self._call is not None

    @property
    def retry_delay(self) -> float:
        """Seconds until a failed stream should be opened anew."""
        return max(0.0, self._retry_at - time.monotonic())

    @property
    def blocked(self) -> str:
        """Why there is no use in asking now, in a few words. Empty: ask."""
        if self._exchange is not None and not self._exchange.done():
            overdue = time.monotonic() - self._due_at
            return f"answer overdue by {overdue:.1f} s" if overdue < self._patience.overdue_s else ""
        return f"failed; next attempt in {self.retry_delay:.1f} s" if self.retry_delay > 0 else ""

    async def ask(self, question: Question[RequestT, ReplyT]) -> list[ReplyT]:
        """Sends a question and waits for its answer.

        Returns:
            The messages of the answer, in order. At least one.

        Raises:
            StageError: No answer came in time (then it is overdue), the stage ended the stream, or what
                came was no answer to this question (then the stream is closed).
        """
        if self._exchange is not None and not self._exchange.done():
            self.abandon()
        exchange = self._exchange = asyncio.create_task(self._converse(question))
        exchange.add_done_callback(self._settle)
        self._due_at = time.monotonic() + self._patience.answer_s
        while not exchange.done():
            time_left = self._due_at - time.monotonic()
            if time_left <= 0:
                raise StageError("no answer in time", overdue=True)
            await asyncio.wait({exchange}, timeout=time_left)
        if exchange.cancelled():
            raise StageError("the connection was closed")
        return exchange.result()

    def abandon(self) -> None:
        """Closes a stream that failed. The next question opens a new one, best after `retry_delay`."""
        self._num_failures += 1
        self._retry_at = time.monotonic() + self._patience.backoff.delay(self._num_failures)
        self.close()

    def close(self) -> None:
        """Ends the stream, which frees the session at the stage. Never waits, so it fits any `finally`."""
        if self._exchange is not None:
            self._exchange.cancel()
        if self._call is not None:
            self._call.cancel()
        self._exchange, self._call = None, None

    async def _converse(self, question: Question[RequestT, ReplyT]) -> list[ReplyT]:
        # A task of its own: to stop waiting for a reply must not cancel the reading of it, which would cancel
        # the whole call.
        try:
            for _ in range(2):
                replies = await self._exchange_messages(question)
                if not replies[-1].HasField("resync_from"):
                    return replies
        except grpc.aio.AioRpcError as error:
            raise _stream_ended(error) from error
        except grpc.aio.BaseError as error:
            raise StageError("the connection was closed") from error
        raise StageError("wants to resync again and again")

    async def _exchange_messages(self, question: Question[RequestT, ReplyT]) -> list[ReplyT]:
        if self._call is None:
            self._call = self._open_call()
            self._epoch += 1
            self._known_length = 0
        call, base, length = self._call, self._known_length, len(question.context)
        delta = ContextDelta(
            session_id=self._session_id, base_length=base, token_ids=question.context[base:length]
        )
        patience = self._patience.answer_s + self._patience.per_token_s * (length - base)
        self._due_at = time.monotonic() + patience
        # The stage may have ended the stream while nothing was asked: reading then tells why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(question.fill(delta, self._epoch))

        expected = (self._epoch, *question.key)
        replies: list[ReplyT] = []
        while (message := await call.read()) is not grpc.aio.EOF:
            if message is None:  # so gRPC tells that it could not be parsed
                raise StageError("sent a malformed message")
            reply = cast(ReplyT, message)
            echo = (reply.epoch, *question.key_of(reply))
            if echo < expected:
                continue  # the answer to an older question
            if echo > expected:
                raise StageError(f"answered question {echo} instead of {expected}")
            replies.append(reply)
            if reply.HasField("resync_from"):
                if not 0 <= reply.resync_from < base:
                    raise StageError(f"wants to resync from {reply.resync_from}, but knows {base} tokens")
                self._known_length = reply.resync_from
                return replies
            if question.is_last(reply):
                self._known_length = length
                return replies
        raise StageError("ended the stream")

    def _settle(self, exchange: "asyncio.Task[list[ReplyT]]") -> None:
        failed = exchange.cancelled() or exchange.exception() is not None
        if exchange is not self._exchange:
            return  # Closed meanwhile.
        if failed:
            self.abandon()
        else:
            self._num_failures = 0


def _stream_ended(error: grpc.aio.AioRpcError) -> StageError:
    try:
        status = describe(error)
    except DecodeError:  # the details are the peer's, and may be anything
        status = RpcError(error.code(), error.code().name, "")
    named = "" if status.reason == status.code.name else f" ({status.reason})"
    return StageError(f"ended the stream with {status.code.name}{named}", status)
