"""One stream, one session: the state rule, its limits, and the accounting around an engine.

It knows ContextDelta and the engine's interface, not what the engine computes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from services.batcher import AnyJob, Batcher
from services.engine import AnswerT, Engine, Job, SessionT, TaskT
from services.limits import check_tenant
from services.stats import Stats
from stagespec.rpc import FieldViolation, RpcError, invalid_argument
from stagespec.v1.context_pb2 import ContextDelta

_log = logging.getLogger(__name__)


class Request(Protocol):
    """What ProposeRequest and VerifyRequest share."""

    @property
    def context(self) -> ContextDelta:
        """Brings the context up to date."""

    @property
    def tenant(self) -> str:
        """Whose session it is; read on a stream's first request."""


RequestT = TypeVar("RequestT", bound=Request)
ResponseT = TypeVar("ResponseT")


class Sessions(Generic[SessionT, TaskT, AnswerT]):
    """The sessions of one stage."""

    def __init__(self, engine: Engine[SessionT, TaskT, AnswerT], stats: Stats, max_sessions: int) -> None:
        self.engine = engine
        self.stats = stats
        self.draining = False
        self.num_live = 0
        self._max_sessions = max_sessions
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._batcher = Batcher(engine, self._book)

    async def serve(
        self,
        requests: AsyncIterator[RequestT],
        read: Callable[[RequestT], TaskT],
        resync: Callable[[RequestT, int], ResponseT],
        write: Callable[[RequestT, Job[SessionT, TaskT, AnswerT]], Iterable[ResponseT]],
    ) -> AsyncIterator[ResponseT]:
        """Answers the requests of one session in order.

        Args:
            requests: The stream.
            read: Makes the engine's task of a request.
            resync: Makes the answer to a delta that begins beyond the context's present length.
            write: Makes the messages that answer a finished job.

        Raises:
            RpcError: The stage is full or draining, or a request breaks the contract.
        """
        session: SessionT | None = None
        session_id = ""
        length = 0
        try:
            async for request in requests:
                delta = request.context
                if session is None:
                    check_tenant(request.tenant)
                    session, session_id = self._open(request.tenant), delta.session_id
                self._check(delta, session_id)
                if delta.base_length > length:
                    self.stats.count("resyncs_total")
                    yield resync(request, length)
                    continue
                job = Job[SessionT, TaskT, AnswerT](
                    session, read(request), delta.base_length, list(delta.token_ids)
                )
                await self._batcher.run(job)
                length = delta.base_length + len(delta.token_ids)
                for response in write(request, job):
                    yield response
        finally:
            if session is not None:
                self._close(session)

    async def drain(self, grace: float) -> int:
        """Takes no new sessions and waits for the live ones; returns how many were left."""
        self.draining = True
        try:
            await asyncio.wait_for(self._emptied.wait(), grace)
        except TimeoutError:
            _log.warning("%d sessions were still live after %.1f s", self.num_live, grace)
        return self.num_live

    def stop(self) -> None:
        """Ends the worker."""
        self._batcher.stop()

    def _open(self, tenant: str) -> SessionT:
        if self.draining:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the stage takes no new sessions")
        if self._max_sessions and self.num_live >= self._max_sessions:
            message = f"the stage serves {self.num_live} sessions and its limit is {self._max_sessions}"
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS", message, retry_after=1.0)
        session = self.engine.new_session(tenant)
        self.num_live += 1
        self._emptied.clear()
        self.stats.count("sessions_live")
        self.stats.count("sessions_total")
        return session

    def _close(self, session: SessionT) -> None:
        self._batcher.release(session)
        self.num_live -= 1
        self.stats.count("sessions_live", -1)
        if not self.num_live:
            self._emptied.set()

    def _check(self, delta: ContextDelta, session_id: str) -> None:
        info = self.engine.info
        violations = []
        if delta.session_id != session_id:
            text = f"'{delta.session_id}' on the stream of session '{session_id}'; one stream, one session"
            violations.append(FieldViolation("context.session_id", text))
        if delta.base_length < 0:
            violations.append(FieldViolation("context.base_length", f"{delta.base_length} is below 0"))
        size = info.vocabulary_size
        bad = next((t for t in delta.token_ids if t < 0 or (size and t >= size)), None)
        if bad is not None:
            violations.append(FieldViolation("context.token_ids", f"{bad} is not in [0, {size})"))
        length = delta.base_length + len(delta.token_ids)
        if info.max_context_length and length > info.max_context_length:
            text = f"the context would have {length} tokens and the limit is {info.max_context_length}"
            violations.append(FieldViolation("context", text))
        if violations:
            raise invalid_argument(violations)

    def _book(self, job: AnyJob) -> None:
        job.spend("total", time.perf_counter() - job.arrived)
        self.stats.count("failures_total" if job.error else "requests_total")
        self.stats.record(job.seconds)
        answer: Any = job.answer
        if answer is not None:
            self.stats.count("rows_total", answer.num_rows)
