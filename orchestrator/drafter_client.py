"""One drafter within one request. Whatever is wrong with it, the request goes on with the hint it was given.

It translates between the decode loop and the stream, holds the drafter to the rules, and keeps its account.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc

from orchestrator.counters import Counters
from orchestrator.observations import ObservationBuffer
from orchestrator.roles import Budget, Proposal
from orchestrator.stage import Stage
from orchestrator.stream import Patience, Question, StageError, StageStream
from orchestrator.work import Work
from stagespec.siblings import likeliest_children
from stagespec.tree import ROOT, DraftTree, most_probable, repair
from stagespec.v1 import drafter_pb2
from stagespec.v1.context_pb2 import ContextDelta
from stagespec.v1.draft_pb2 import DraftTree as DraftTreeMessage
from stagespec.v1.drafter_pb2 import ProposeRequest, ProposeResponse
from stagespec.v1.drafter_pb2_grpc import DrafterServiceStub
from stagespec.v1.sampling_pb2 import SamplingParams

_MOST_EXCESS = 4
"""Times the nodes that were asked for. What a drafter sends beyond is not even looked at."""


class DrafterClient:
    """A drafter as one request uses it.

    Args:
        stage: The drafter.
        index: Marks its nodes within the request.
        session_id: Names the request at the stage.
        sampling: The request's sampling.
        tenant: Whose request it is.
        vocabulary_size: Its tokens must be below this.
        patience: How long to wait for it.

    Attributes:
        stage: The drafter.
        counters: What it did for this request.
        work: What its model did for this request.
        num_skipped_steps: Steps that went on without it.
        skip_reason: Why it was last skipped; empty if it never was.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        session_id: str,
        sampling: SamplingParams,
        tenant: str,
        vocabulary_size: int,
        patience: Patience,
    ) -> None:
        self.stage = stage
        self.counters = Counters()
        self.work = Work()
        self.num_skipped_steps = 0
        self.skip_reason = ""
        self._index = index
        self._sampling = sampling
        self._tenant = tenant
        self._vocabulary_size = vocabulary_size
        self._observations = ObservationBuffer(stage.info.observations)
        self._stream: StageStream[ProposeRequest, ProposeResponse] = StageStream(
            self._open_call, session_id, patience
        )
        self._last_skipped = 0

    async def propose(
        self, context: Sequence[int], hint: DraftTree, budget: Budget, step_id: int, round_number: int
    ) -> Proposal:
        """Asks the drafter, unless there is no use in it. See `orchestrator.roles.Drafter`."""
        budget, reason = self._own_budget(context, budget)
        reason = reason or self._stream.blocked or ("" if self._stream.is_open else self.stage.shunned)
        if reason:
            self._skip(step_id, reason)
            return Proposal(hint)

        started = time.perf_counter()
        question = self._question(context, hint, budget, step_id, round_number)
        try:
            [response] = await self._stream.ask(question)
        except StageError as error:
            self.count(Counters(num_calls=1, num_failures=1, seconds=time.perf_counter() - started))
            if error.overdue or (error.status and error.status.code is grpc.StatusCode.UNAVAILABLE):
                self.stage.note_silence(error.reason)
            self._skip(step_id, error.reason)
            return Proposal(hint)
        self.stage.note_answer()
        num_excess = _cut(response.draft, _MOST_EXCESS * budget.max_nodes)
        repaired = repair(
            response.draft,
            vocabulary_size=self._vocabulary_size,
            max_nodes=_MOST_EXCESS * budget.max_nodes,
            max_depth=budget.max_depth,
        )
        draft = repaired.tree
        if budget.max_children is not None:
            # No fault of the drafter's, which may not know this limit.
            draft = likeliest_children(draft, budget.max_children)
        if len(draft) > budget.max_nodes:
            num_excess += len(draft) - budget.max_nodes
            draft = draft.select(most_probable(draft, budget.max_nodes))
        num_passes = max(0, response.num_passes)
        self.work.add(step_id, len(context), num_passes, max(0, response.num_rows))
        self.count(
            Counters(
                num_calls=1,
                num_passes=num_passes,
                num_dropped_nodes=repaired.num_dropped + num_excess,
                seconds=time.perf_counter() - started,
            )
        )
        gain = response.next_round_gain
        return Proposal(credit(draft, hint, self._index), gain if math.isfinite(gain) and gain > 0 else 0.0)

    def count(self, counters: Counters) -> None:
        """Adds to the request's account and to the drafter's own."""
        self.counters.add(counters)
        self.stage.counters.add(counters)

    def close(self) -> None:
        """Frees the session at the stage. Never waits."""
        self._stream.close()

    @property
    def observations(self) -> ObservationBuffer:
        """What the target computed since the last request to this drafter."""
        return self._observations

    def _open_call(self) -> "grpc.aio.StreamStreamCall[ProposeRequest, ProposeResponse]":
        return DrafterServiceStub(self.stage.channel).Propose()

    def _own_budget(self, context: Sequence[int], budget: Budget) -> tuple[Budget, str]:
        info = self.stage.info
        max_nodes = budget.max_nodes
        if info.max_nodes > 0:
            max_nodes = min(max_nodes, info.max_nodes)
        if info.max_context_length > 0:
            max_nodes = min(max_nodes, info.max_context_length - len(context))
        reason = f"context length {info.max_context_length}" if max_nodes < 1 else ""
        return replace(budget, max_nodes=max_nodes), reason

    def _question(
        self, context: Sequence[int], hint: DraftTree, budget: Budget, step_id: int, round_number: int
    ) -> Question[ProposeRequest, ProposeResponse]:
        if len(hint) > budget.max_nodes:
            hint = hint.select(most_probable(hint, budget.max_nodes))
        observations = self._observations.take()

        def fill(delta: ContextDelta, epoch: int) -> ProposeRequest:
            return ProposeRequest(
                step_id=step_id,
                epoch=epoch,
                round=round_number,
                context=delta,
                sampling=self._sampling,
                hint=hint.to_proto(),
                budget=drafter_pb2.Budget(
                    max_nodes=budget.max_nodes,
                    max_depth=budget.max_depth,
                    node_price=budget.node_price,
                    pass_price=budget.pass_price,
                    max_children=budget.max_children or 0,
                ),
                drafter_index=self._index,
                observations=observations,
                tenant=self._tenant,
            )

        return Question(
            context=context,
            key=(step_id, round_number),
            fill=fill,
            key_of=lambda reply: (reply.step_id, reply.round),
            is_last=lambda reply: True,
        )

    def _skip(self, step_id: int, reason: str) -> None:
        self.skip_reason = reason
        if step_id != self._last_skipped:  # once, however many rounds the step has
            self._last_skipped = step_id
            self.num_skipped_steps += 1


def _cut(draft: DraftTreeMessage, most: int) -> int:
    # A message may hold millions of nodes, and to look at them all would hold up every other request.
    num_excess = max(0, len(draft.token_ids) - most)
    for values in (draft.token_ids, draft.parents, draft.log_probs, draft.drafter_indices):
        del values[most:]
    return num_excess


def credit(draft: DraftTree, hint: DraftTree, sender: int) -> DraftTree:
    """Writes down who proposed each node of an answer.

    A node belongs to whoever put the same path into the hint, and to the sender if nobody did. What the
    answer itself says about it is not needed, so it cannot be forged.
    """
    children = hint.children()
    twins: list[int | None] = []  # the node of the hint at the end of the same path
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        above = ROOT if parent == ROOT else twins[parent]
        twins.append(None if above is None else children.get(above, {}).get(token_id))
    owners = (sender if twin is None else hint.drafter_indices[twin] for twin in twins)
    return replace(draft, drafter_indices=tuple(owners))
