"""The verifier within one request. Unlike a drafter it may not fail: it is waited for, and checked.

It translates between the decode loop and the stream. Nothing it says is believed before it has been held
against the draft that was sent.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeGuard

import grpc

from orchestrator.counters import Counters
from orchestrator.roles import Verdict
from orchestrator.stage import Stage
from orchestrator.stream import Patience, Question, StageError, StageStream
from orchestrator.work import Work
from stagespec.rpc import RpcError
from stagespec.tree import ROOT, DraftTree
from stagespec.v1 import verifier_pb2
from stagespec.v1.context_pb2 import ContextDelta
from stagespec.v1.observation_pb2 import Observation, ObservationRequest
from stagespec.v1.sampling_pb2 import SamplingParams
from stagespec.v1.verifier_pb2 import VerifyRequest, VerifyResponse
from stagespec.v1.verifier_pb2_grpc import VerifierServiceStub

_log = logging.getLogger(__name__)

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""What a stage that is going away or coming back answers."""

_FULL = ("TOO_MANY_SESSIONS", "CACHE_FULL")
"""What a stage answers that has yet to notice that other requests have ended."""

_MOST_RETRIES = 3

_FAILED = RpcError(
    grpc.StatusCode.INTERNAL, "VERIFIER_FAILED", "the verifier failed on this request; its log says why"
)


class VerifierClient:
    """The verifier as one request uses it.

    Args:
        stage: The verifier.
        session_id: Names the request at the stage.
        sampling: How tokens are drawn.
        tenant: Whose request it is.
        num_logprobs: Alternatives to report; None for no log probabilities.
        vocabulary_size: Its tokens must be below this.
        patience: How long to wait for it.
        recovery_s: Seconds for a lost verifier to come back.
        wishes: What drafters want to observe now.
        on_observations: Takes what was observed.

    Attributes:
        counters: What it did for this request.
        work: What its model did for this request.
    """

    def __init__(
        self,
        stage: Stage,
        session_id: str,
        sampling: SamplingParams,
        tenant: str,
        num_logprobs: int | None,
        vocabulary_size: int,
        patience: Patience,
        recovery_s: float,
        wishes: Callable[[], ObservationRequest],
        on_observations: Callable[[Sequence[Observation]], None],
    ) -> None:
        self.counters = Counters()
        self.work = Work()
        self._stage = stage
        self._sampling = sampling
        self._tenant = tenant
        self._num_logprobs = num_logprobs
        self._vocabulary_size = vocabulary_size
        self._recovery_s = recovery_s
        self._wishes = wishes
        self._on_observations = on_observations
        self._stream: StageStream[VerifyRequest, VerifyResponse] = StageStream(
            self._open_call, session_id, patience
        )

    async def verify(self, context: Sequence[int], draft: DraftTree, step_id: int) -> Verdict:
        """Asks for a verdict, again and again while the verifier is restarted. See `Verifier`.

        Raises:
            RpcError: UNAVAILABLE (VERIFIER_LOST) if it did not come back in time, INTERNAL (BROKEN_VERDICT)
                if what it decided cannot be, or its own refusal; that it has no room only if that lasts.
        """
        replies = await self._ask(self._question(context, draft, step_id))
        message = replies[-1].verdict
        flaw = find_flaw(message, draft, self._vocabulary_size, self._num_logprobs is not None)
        if flaw:
            _log.error("the verifier's verdict on step %d is broken: %s", step_id, flaw)
            raise RpcError(
                grpc.StatusCode.INTERNAL, "BROKEN_VERDICT", "the verifier sent an impossible verdict"
            )
        for reply in replies:
            self._on_observations(reply.observations)
        self.work.add(step_id, len(context), 1, max(0, message.num_rows))
        self.count(
            Counters(
                num_passes=1, num_nodes=max(0, message.num_nodes), num_accepted=len(message.accepted_nodes)
            )
        )
        return Verdict(tuple(message.token_ids), tuple(message.accepted_nodes), tuple(message.logprobs))

    def count(self, counters: Counters) -> None:
        """Adds to the request's account and to the verifier's own."""
        self.counters.add(counters)
        self._stage.counters.add(counters)

    def close(self) -> None:
        """Frees the session at the stage. Never waits."""
        self._stream.close()

    async def _ask(self, question: Question[VerifyRequest, VerifyResponse]) -> list[VerifyResponse]:
        lost_at = 0.0
        for num_failures in itertools.count():
            try:
                replies = await self._ask_once(question)
            except StageError as error:
                _raise_if_final(error, num_failures)
                if num_failures == 0:
                    lost_at = time.monotonic()
                    _log.warning("the verifier gave no verdict and is waited for: %s", error.reason)
                if time.monotonic() - lost_at > self._recovery_s:
                    raise _given_up(error, self._recovery_s) from error
                await asyncio.sleep(self._stream.retry_delay)
            else:
                if num_failures > 0:
                    _log.info("the verifier is back after %.1f s", time.monotonic() - lost_at)
                return replies
        raise AssertionError("unreachable")

    async def _ask_once(self, question: Question[VerifyRequest, VerifyResponse]) -> list[VerifyResponse]:
        started = time.monotonic()
        try:
            replies = await self._stream.ask(question)
        except StageError as error:
            if error.overdue:
                self._stream.abandon()
            if _is_refusal(error.status):
                self._stage.note_answer()
            else:
                self._stage.note_silence(error.reason)
            self.count(Counters(num_calls=1, num_failures=1, seconds=time.monotonic() - started))
            raise
        self._stage.note_answer()
        self.count(Counters(num_calls=1, seconds=time.monotonic() - started))
        return replies

    def _open_call(self) -> "grpc.aio.StreamStreamCall[VerifyRequest, VerifyResponse]":
        return VerifierServiceStub(self._stage.channel).Verify()

    def _question(
        self, context: Sequence[int], draft: DraftTree, step_id: int
    ) -> Question[VerifyRequest, VerifyResponse]:
        wishes = self._wishes()

        def fill(delta: ContextDelta, epoch: int) -> VerifyRequest:
            return VerifyRequest(
                step_id=step_id,
                epoch=epoch,
                context=delta,
                sampling=self._sampling,
                draft=draft.to_proto(),
                num_logprobs=self._num_logprobs,
                observations=wishes,
                tenant=self._tenant,
            )

        return Question(
            context=context,
            key=(step_id,),
            fill=fill,
            key_of=lambda reply: (reply.step_id,),
            is_last=lambda reply: reply.HasField("verdict"),
        )


def find_flaw(
    verdict: verifier_pb2.Verdict, draft: DraftTree, vocabulary_size: int, wants_logprobs: bool
) -> str:
    """What is wrong with a verdict on `draft`. Empty: nothing.

    The accepted nodes must be a path of the draft that starts at its root, and the committed tokens those of
    the path and the bonus token.
    """
    parent = ROOT
    for node in verdict.accepted_nodes:
        if not 0 <= node < len(draft) or draft.parents[node] != parent:
            return f"accepted nodes {list(verdict.accepted_nodes)} are no path of the draft"
        parent = node
    accepted = [draft.token_ids[node] for node in verdict.accepted_nodes]
    if list(verdict.token_ids) != [*accepted, verdict.bonus_token_id]:
        return f"committed {list(verdict.token_ids)}, accepted {accepted}, bonus {verdict.bonus_token_id}"
    if not 0 <= verdict.bonus_token_id < vocabulary_size:
        return f"token {verdict.bonus_token_id} is outside the vocabulary of {vocabulary_size}"
    if wants_logprobs:
        if len(verdict.logprobs) != len(verdict.token_ids):
            return f"{len(verdict.logprobs)} log probabilities for {len(verdict.token_ids)} tokens"
        if any(math.isnan(entry.log_prob) for entry in verdict.logprobs):
            return "a log probability is not a number"
    return ""


def _raise_if_final(error: StageError, num_failures: int) -> None:
    if error.status is None or error.status.code in _PASSING or error.status.reason in _FULL:
        return
    # What is no refusal may be internal; it may also be all that is left of a process that died, which is
    # worth another try.
    if _is_refusal(error.status):
        raise error.status from error
    if num_failures >= _MOST_RETRIES:
        raise _FAILED from error


def _is_refusal(status: RpcError | None) -> TypeGuard[RpcError]:
    # A reason of its own shows that the stage is well and that the text was written for callers.
    return status is not None and status.code not in _PASSING and status.reason != status.code.name


def _given_up(error: StageError, recovery_s: float) -> RpcError:
    if error.status is not None and error.status.reason in _FULL:
        return error.status
    return RpcError(
        grpc.StatusCode.UNAVAILABLE,
        "VERIFIER_LOST",
        f"the verifier is lost and did not come back within {recovery_s:g} s",
        retry_after=recovery_s,
    )
