"""The target: verifies the drafts of all ready sessions in one forward pass.

One turn takes each session either one chunk of its prefill further or to its verdict. It does not know who
drafted, and no session changes another's tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.causal_lm.load import LoadedModel, load
from services.causal_lm.packed import Output, Segment, forward
from services.causal_lm.rows import Rows
from services.causal_lm.turn import Need, share_pass
from services.engine import Job, Verdict, VerifyTask
from services.sampling import History, Ids, draw, logprobs
from services.target.accept import walk
from services.target.observe import observe_candidates, observe_hidden_states
from services.target.settings import TargetSettings
from stagespec.tree import ROOT
from stagespec.v1 import stage_pb2
from stagespec.v1.observation_pb2 import Observation
from stagespec.v1.verifier_pb2 import TokenLogprobs
from stagespec.vocabulary import Vocabulary


class TargetSession:
    """One request: its context, and the rows computed for it."""

    def __init__(self, rows: Rows) -> None:
        self.context: list[int] = []
        self.rows = rows
        self.num_rows = 0  # computed for the present job
        self.observations: list[Observation] = []  # of the present job

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        """See `services.engine.Session`."""
        self.context[base_length:] = token_ids
        self.rows.follow(self.context)
        # Logits are not kept, so the last context token always runs; whatever lies beyond the path is a draft
        # that is over.
        self.rows.truncate(min(self.rows.path_length, len(self.context) - 1))
        self.num_rows = 0
        self.observations = []

    def close(self) -> None:
        """See `services.engine.Session`."""
        self.context = []
        self.rows.truncate(0)


TargetJob = Job[TargetSession, VerifyTask, Verdict]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one job runs in a pass: context tokens, and the draft if they end the prefill."""

    job: TargetJob
    segment: Segment
    num_context: int
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
        self._info.hidden_size = self._loaded.model.config.get_text_config().hidden_size
        self._ids: Ids = np.arange(self._info.vocabulary_size)
        self._warm_up()

    @property
    def info(self) -> stage_pb2.StageInfo:
        """See `services.engine.Engine`."""
        return self._info

    @property
    def vocabulary(self) -> Vocabulary | None:
        """See `services.engine.Engine`."""
        return self._loaded.vocabulary

    def new_session(self) -> TargetSession:
        """See `services.engine.Engine`."""
        return TargetSession(self._loaded.new_rows())

    def run(self, jobs: Sequence[TargetJob]) -> None:
        """See `services.engine.Engine`."""
        needs = [
            Need(len(job.session.context) - len(job.session.rows), len(job.task.draft), job.arrived)
            for job in jobs
        ]
        settings = self._settings
        shares = share_pass(needs, max_rows=settings.max_batch_rows, chunk=settings.prefill_chunk)
        turns = [_lay_out(jobs[index], num_context) for index, num_context in shares]
        begin = time.perf_counter()
        outputs = forward(self._loaded.model, [turn.segment for turn in turns])
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
            turn.job.spend("accept", time.perf_counter() - begin)

    def _warm_up(self) -> None:
        """Runs the largest tree, so that memory is found short at start and not in service."""
        rows = self._loaded.new_rows()
        for _ in range(min(self._info.max_nodes, self._info.max_context_length)):
            rows.add(len(rows) - 1, 0)
        forward(self._loaded.model, [Segment(rows, len(rows), range(len(rows)))])

    def _decide(self, turn: _Turn, output: Output, num_sessions: int) -> Verdict:
        """Walks the draft along the target's draws."""
        job, task = turn.job, turn.job.task
        # Row 0 follows the context, row i + 1 follows node i. [1 + num_nodes, vocab]
        logits = output.logits[:, : len(self._ids)].cpu()
        values = logits.numpy()
        context = job.session.context
        history = History(task.sampling, context)
        drawn: list[int] = []
        entries: list[TokenLogprobs] = []

        def draw_after(node: int) -> int:
            if node != ROOT:
                history.append(task.draft.token_ids[node])
            position = len(context) + len(drawn)
            token_id = draw(self._ids, values[node + 1], task.sampling, history, position)
            drawn.append(token_id)
            if task.num_logprobs is not None:
                entries.append(logprobs(values[node + 1], token_id, task.num_logprobs))
            return token_id

        accepted, token_ids = walk(task.draft, draw_after)
        if task.observations.hidden_states and accepted:
            path = output.hidden_states[[turn.num_context + node for node in accepted]]
            job.session.observations += observe_hidden_states(
                path, len(context), task.observations.hidden_states
            )
        if task.observations.num_candidates:
            tokens = [context[-1], *task.draft.token_ids]
            candidates = observe_candidates(tokens, logits, task.observations.num_candidates)
            job.session.observations.append(Observation(first_position=len(context), candidates=candidates))
        return Verdict(
            accepted_nodes=accepted,
            token_ids=token_ids,
            logprobs=tuple(entries),
            num_rows=job.session.num_rows,
            num_batched_sessions=num_sessions,
            observations=tuple(job.session.observations),
        )


def _lay_out(job: TargetJob, num_context: int) -> _Turn:
    """Adds the rows of some context tokens and, at the end of the context, of the draft."""
    rows, context = job.session.rows, job.session.context
    first = len(rows)
    for token_id in context[first : first + num_context]:
        rows.add(len(rows) - 1, token_id)
    rows.grow_path(first + num_context)
    is_last = len(rows) == len(context)
    if not is_last:
        return _Turn(job, Segment(rows, num_context, []), num_context, is_last)
    tree, nodes = job.task.draft, list[int]()
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        nodes.append(rows.add(len(context) - 1 if parent == ROOT else nodes[parent], token_id))
    num_new = num_context + len(tree)
    return _Turn(job, Segment(rows, num_new, range(num_context - 1, num_new)), num_context, is_last)


def _observe_context(turn: _Turn, output: Output) -> None:
    """Keeps the hidden states of this turn's context tokens, if they are wanted."""
    wanted = turn.job.task.observations.hidden_states
    if wanted and turn.num_context:
        session = turn.job.session
        first = session.rows.path_length - turn.num_context
        session.observations += observe_hidden_states(output.hidden_states[: turn.num_context], first, wanted)
