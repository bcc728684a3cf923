"""The target: verifies the drafts of all ready sessions in one forward pass.

One turn takes each session either one chunk of its prefill further or to its verdict. It does not know who
drafted, and no session changes another's tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.causal_lm.forward import Output, Segment
from services.causal_lm.load import LoadedModel, load
from services.causal_lm.session_cache import SessionCache, new_cache
from services.causal_lm.turn import Need, PassLimits, Share, share_pass
from services.engine import Job, Verdict, VerifyTask
from services.sampling import History, Ids, draw, logprobs
from services.target.accept import walk
from services.target.observe import observe_candidates, observe_hidden_states
from services.target.settings import TargetSettings
from stagespec.rpc import RpcError
from stagespec.tree import EMPTY_DRAFT, ROOT, DraftTree
from stagespec.v1 import stage_pb2
from stagespec.v1.observation_pb2 import Observation
from stagespec.v1.verifier_pb2 import TokenLogprobs
from stagespec.vocabulary import Vocabulary


class TargetSession:
    """One request: its context, and the rows computed for it."""

    def __init__(self, cache: SessionCache, tenant: str) -> None:
        self.context: list[int] = []
        self.committed: tuple[int, ...] = ()  # by the last verdict; the context has them with the next delta
        self.rows = cache.new_rows()
        self.failed = False
        self.num_rows = 0  # computed for the present job
        self.observations: list[Observation] = []  # of the present job
        self._cache = cache
        self._tenant = tenant

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        """See `services.engine.Session`."""
        if not self.context and not len(self.rows):
            self.rows = self._cache.open(self.rows, self._tenant, token_ids)
        self.context[base_length:] = token_ids
        self.committed = ()
        self.rows.follow(self.context, base_length)
        # Logits are not kept, so the last context token always runs; whatever lies beyond the path is a draft
        # that is over.
        self.rows.truncate(min(self.rows.path_length, len(self.context) - 1))
        self.num_rows = 0
        self.observations = []

    def close(self) -> None:
        """See `services.engine.Session`."""
        self.rows.follow([*self.context, *self.committed], len(self.context))
        # What led to a fault may be in its rows.
        self._cache.close(self.rows, None if self.failed else self._tenant)
        self.context = []


TargetJob = Job[TargetSession, VerifyTask, Verdict]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one job runs in a pass: context tokens, and a draft if they end the prefill."""

    job: TargetJob
    segment: Segment
    num_context: int
    nodes: Sequence[int]  # those of the draft that run
    draft: DraftTree  # made of these nodes alone
    is_last: bool


class TargetEngine:
    """Runs the target model."""

    def __init__(self, settings: TargetSettings) -> None:
        """Loads the model.

        Raises:
            UnservableModelError: It cannot be served; the text says why.
        """
        self._settings = settings
        self._loaded: LoadedModel = load(settings)
        self._info = self._loaded.info
        self._info.kind = stage_pb2.STAGE_KIND_VERIFIER
        self._info.implementation = "target"
        self._info.hidden_size = self._loaded.hidden_size
        self._ids: Ids = np.arange(self._info.vocabulary_size)
        self._limits = PassLimits(
            settings.max_batch_rows, settings.prefill_chunk, settings.shared_prefill_chunk
        )
        self._warm_up()
        self._cache = new_cache(settings, self._loaded)

    @property
    def info(self) -> stage_pb2.StageInfo:
        """See `services.engine.Engine`."""
        return self._info

    @property
    def vocabulary(self) -> Vocabulary | None:
        """See `services.engine.Engine`."""
        return self._loaded.vocabulary

    @property
    def counters(self) -> dict[str, int]:
        """See `services.engine.Engine`."""
        return self._cache.counters

    def new_session(self, tenant: str = "") -> TargetSession:
        """See `services.engine.Engine`."""
        return TargetSession(self._cache, tenant)

    def run(self, jobs: Sequence[TargetJob]) -> None:
        """See `services.engine.Engine`."""
        ready = [job for job in jobs if self._reserve(job)]
        needs = [
            Need(
                len(job.session.context) - len(job.session.rows),
                job.arrived,
                job.task.draft,
                range(len(job.task.draft)),
            )
            for job in ready
        ]
        others_decode = self._cache.num_live > len(ready)
        shares = share_pass(needs, self._limits, others_decode=others_decode)
        if not shares:
            return
        turns = [_lay_out(ready[share.index], share) for share in shares]
        begin = time.perf_counter()
        try:
            outputs = self._loaded.forward([turn.segment for turn in turns])
        except Exception:
            for turn in turns:
                turn.job.session.failed = True
            raise
        spent = time.perf_counter() - begin
        for turn, output in zip(turns, outputs, strict=True):
            turn.job.spend("forward", spent)
            turn.job.session.num_rows += turn.segment.num_new
            begin = time.perf_counter()
            try:
                _observe_context(turn, output)
                if turn.is_last:
                    turn.job.answer = self._decide(turn, output, len(turns))
            except Exception as error:
                turn.job.error = error
                turn.job.session.failed = True
            turn.job.spend("accept", time.perf_counter() - begin)

    def _reserve(self, job: TargetJob) -> bool:
        """Makes sure of a job's memory before anything runs for it."""
        try:
            self._cache.reserve(job.session.rows, len(job.session.context) + len(job.task.draft))
        except RpcError as error:
            job.error = error
            return False
        return True

    def _warm_up(self) -> None:
        """Runs the largest tree, so that memory is found short at start and not in service."""
        rows = self._loaded.new_rows()
        for _ in range(min(self._info.max_nodes, self._info.max_context_length)):
            rows.add(len(rows) - 1, 0)
        self._loaded.forward([Segment(rows, len(rows), range(len(rows)))])

    def _decide(self, turn: _Turn, output: Output, num_sessions: int) -> Verdict:
        """Walks the draft along the target's draws."""
        job, task, draft = turn.job, turn.job.task, turn.draft
        # Row 0 follows the context, row i + 1 follows node i. [1 + num_nodes, vocab]
        logits = output.logits[:, : len(self._ids)].cpu()
        values = logits.numpy()
        context = job.session.context
        history = History(task.sampling, context)
        drawn: list[int] = []
        entries: list[TokenLogprobs] = []

        def draw_after(node: int) -> int:
            if node != ROOT:
                history.append(draft.token_ids[node])
            position = len(context) + len(drawn)
            token_id = draw(self._ids, values[node + 1], task.sampling, history, position)
            drawn.append(token_id)
            if task.num_logprobs is not None:
                entries.append(logprobs(values[node + 1], token_id, task.num_logprobs))
            return token_id

        accepted, token_ids = walk(draft, draw_after)
        job.session.committed = token_ids
        if task.observations.hidden_states and accepted:
            path = output.hidden_states[[turn.num_context + node for node in accepted]]
            job.session.observations += observe_hidden_states(
                path, len(context), task.observations.hidden_states
            )
        if task.observations.num_candidates:
            tokens = [context[-1], *draft.token_ids]
            candidates = observe_candidates(tokens, logits, task.observations.num_candidates)
            job.session.observations.append(Observation(first_position=len(context), candidates=candidates))
        return Verdict(
            accepted_nodes=tuple(turn.nodes[node] for node in accepted),
            token_ids=token_ids,
            logprobs=tuple(entries),
            num_nodes=len(draft),
            num_rows=job.session.num_rows,
            num_batched_sessions=num_sessions,
            observations=tuple(job.session.observations),
        )


def _lay_out(job: TargetJob, share: Share) -> _Turn:
    """Adds the rows of some context tokens and, at the end of the context, of the draft."""
    rows, context, num_context = job.session.rows, job.session.context, share.num_context
    first = len(rows)
    rows.extend(context[first : first + num_context])
    is_last = len(rows) == len(context)
    if not is_last:
        return _Turn(job, Segment(rows, num_context, []), num_context, (), EMPTY_DRAFT, is_last)
    nodes, draft = share.nodes, job.task.draft
    if len(nodes) < len(draft):
        draft = draft.select(nodes)
    added: list[int] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        added.append(rows.add(len(context) - 1 if parent == ROOT else added[parent], token_id))
    num_new = num_context + len(draft)
    segment = Segment(rows, num_new, range(num_context - 1, num_new))
    return _Turn(job, segment, num_context, nodes, draft, is_last)


def _observe_context(turn: _Turn, output: Output) -> None:
    """Keeps the hidden states of this turn's context tokens, if they are wanted."""
    wanted = turn.job.task.observations.hidden_states
    if wanted and turn.num_context:
        session = turn.job.session
        first = session.rows.path_length - turn.num_context
        session.observations += observe_hidden_states(output.hidden_states[: turn.num_context], first, wanted)
