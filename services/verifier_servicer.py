"""VerifierService over a target's engine: messages in, values through, messages out."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from services.engine import Job, Session, Verdict, VerifyTask
from services.limits import MAX_LOGPROBS, check_observations, check_sampling
from services.sessions import Sessions
from stagespec.rpc import FieldViolation, invalid_argument, to_duration
from stagespec.tree import Repaired, repair
from stagespec.v1 import verifier_pb2
from stagespec.v1.observation_pb2 import Observation
from stagespec.v1.verifier_pb2 import VerifyRequest, VerifyResponse, VerifyTimings
from stagespec.v1.verifier_pb2_grpc import VerifierServiceServicer

VerifierSessions = Sessions[Session, VerifyTask, Verdict]

OBSERVATION_BYTES = 4 * 1024 * 1024
"""Observations beyond this go into messages of their own, before the verdict."""


class VerifierServicer(VerifierServiceServicer):
    """Serves a target's sessions."""

    def __init__(self, sessions: VerifierSessions) -> None:
        self._sessions = sessions

    def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[VerifyResponse]:
        info = self._sessions.engine.info
        stats = self._sessions.stats
        repaired: Repaired

        def read(request: VerifyRequest) -> VerifyTask:
            nonlocal repaired
            _check(request, info.max_context_length)
            room = info.max_context_length - request.context.base_length - len(request.context.token_ids)
            repaired = repair(
                request.draft,
                vocabulary_size=info.vocabulary_size,
                max_nodes=min(info.max_nodes, room),
            )
            stats.count("dropped_nodes_total", repaired.num_dropped)
            return VerifyTask(
                sampling=request.sampling,
                draft=repaired.tree,
                num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
                observations=request.observations,
            )

        def resync(request: VerifyRequest, length: int) -> VerifyResponse:
            return VerifyResponse(step_id=request.step_id, epoch=request.epoch, resync_from=length)

        def write(request: VerifyRequest, job: Job[Session, VerifyTask, Verdict]) -> Iterator[VerifyResponse]:
            verdict = job.answer
            assert verdict is not None
            stats.count("nodes_total", verdict.num_nodes)
            stats.count("pruned_nodes_total", len(repaired.tree) - verdict.num_nodes)
            stats.count("accepted_total", len(verdict.accepted_nodes))
            timings = {part: to_duration(value) for part, value in job.seconds.items() if part != "grow"}
            *first, last = _chunks(verdict.observations)
            for observations in first:
                yield VerifyResponse(step_id=request.step_id, epoch=request.epoch, observations=observations)
            yield VerifyResponse(
                step_id=request.step_id,
                epoch=request.epoch,
                observations=last,
                verdict=verifier_pb2.Verdict(
                    token_ids=verdict.token_ids,
                    accepted_nodes=[repaired.sent_indices[node] for node in verdict.accepted_nodes],
                    bonus_token_id=verdict.token_ids[-1],
                    logprobs=verdict.logprobs,
                    num_nodes=verdict.num_nodes,
                    num_dropped_nodes=repaired.num_dropped,
                    num_rows=verdict.num_rows,
                    num_batched_sessions=verdict.num_batched_sessions,
                    timings=VerifyTimings(**timings),
                ),
            )

        return self._sessions.serve(request_iterator, read, resync, write)


def _check(request: VerifyRequest, max_context_length: int) -> None:
    """Refuses what cannot be decoded; a peer that sends it has a fault, so nothing is guessed.

    Raises:
        RpcError: INVALID_ARGUMENT naming the fields.
    """
    violations = [*check_sampling(request.sampling), *check_observations(request.observations)]
    length = request.context.base_length + len(request.context.token_ids)
    if length < 1:
        violations.append(FieldViolation("context", "an empty context cannot be continued; send one token"))
    if length >= max_context_length:
        text = f"the context has {length} tokens; with the next one it passes the limit {max_context_length}"
        violations.append(FieldViolation("context", text))
    if request.num_logprobs not in range(MAX_LOGPROBS + 1):
        text = f"{request.num_logprobs} is not in [0, {MAX_LOGPROBS}]"
        violations.append(FieldViolation("num_logprobs", text))
    if violations:
        raise invalid_argument(violations)


def _chunks(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Observations in portions that fit a message; at least one portion, perhaps empty."""
    chunks: list[list[Observation]] = [[]]
    size = 0
    for observation in observations:
        size += observation.ByteSize()
        if chunks[-1] and size > OBSERVATION_BYTES:
            chunks.append([])
            size = observation.ByteSize()
        chunks[-1].append(observation)
    return chunks
