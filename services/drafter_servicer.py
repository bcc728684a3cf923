"""DrafterService over any drafter's engine: messages in, values through, messages out."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from services.engine import Job, Proposal, ProposeTask, Session
from services.limits import check_sampling
from services.sessions import Sessions
from stagespec.rpc import invalid_argument, to_duration
from stagespec.tree import repair
from stagespec.v1.drafter_pb2 import ProposeRequest, ProposeResponse, ProposeTimings
from stagespec.v1.drafter_pb2_grpc import DrafterServiceServicer

DrafterSessions = Sessions[Session, ProposeTask, Proposal]


class DrafterServicer(DrafterServiceServicer):
    """Serves a drafter's sessions."""

    def __init__(self, sessions: DrafterSessions) -> None:
        self._sessions = sessions

    def Propose(self, request_iterator: Any, context: Any) -> AsyncIterator[ProposeResponse]:
        dropped = 0

        def read(request: ProposeRequest) -> ProposeTask:
            nonlocal dropped
            violations = list(check_sampling(request.sampling))
            if violations:
                raise invalid_argument(violations)
            info, budget = self._sessions.engine.info, request.budget
            budget.max_nodes = max(0, min(budget.max_nodes, info.max_nodes or budget.max_nodes))
            repaired = repair(
                request.hint,
                vocabulary_size=info.vocabulary_size or 1 << 31,
                max_nodes=budget.max_nodes,
                max_depth=max(0, budget.max_depth),
                sender=request.drafter_index,
            )
            dropped = repaired.num_dropped
            self._sessions.stats.count("dropped_nodes_total", dropped)
            return ProposeTask(
                sampling=request.sampling,
                hint=repaired.tree,
                budget=budget,
                drafter_index=request.drafter_index,
                observations=request.observations,
            )

        def resync(request: ProposeRequest, length: int) -> ProposeResponse:
            return ProposeResponse(
                step_id=request.step_id, epoch=request.epoch, round=request.round, resync_from=length
            )

        def write(
            request: ProposeRequest, job: Job[Session, ProposeTask, Proposal]
        ) -> Iterator[ProposeResponse]:
            proposal = job.answer
            assert proposal is not None
            self._sessions.stats.count("nodes_total", len(proposal.draft))
            self._sessions.stats.count("passes_total", proposal.num_passes)
            timings = {part: to_duration(value) for part, value in job.seconds.items() if part != "accept"}
            yield ProposeResponse(
                step_id=request.step_id,
                epoch=request.epoch,
                round=request.round,
                draft=proposal.draft.to_proto(),
                next_round_gain=proposal.next_round_gain,
                num_passes=proposal.num_passes,
                num_rows=proposal.num_rows,
                num_dropped_nodes=dropped,
                timings=ProposeTimings(**timings),
            )

        return self._sessions.serve(request_iterator, read, resync, write)
