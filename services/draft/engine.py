"""The draft model: scores the hint in one pass, then grows the tree from what it knows.

Each answer costs one pass at most, over the uncached context tokens and the nodes it has not seen. It is a
drafter like any other: nothing it answers can change a token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn.functional import pad

from services.calibration import Calibration
from services.causal_lm.forward import Output, Segment
from services.causal_lm.session_cache import SessionCache, new_cache
from services.causal_lm.turn import Need, PassLimits, Share, share_pass
from services.draft.candidates import (
    INITIAL_TRUST,
    Candidates,
    Place,
    calibrated,
    rank,
    update_trust,
)
from services.draft.features import Features
from services.draft.growth import grow
from services.draft.model import DraftModel, load_draft
from services.draft.settings import DraftSettings
from services.engine import Job, Proposal, ProposeTask
from services.sampling import History
from stagespec.rpc import RpcError
from stagespec.tree import EMPTY_DRAFT, ROOT, DraftTree
from stagespec.v1 import stage_pb2
from stagespec.vocabulary import Vocabulary

MAX_PASS_ROWS = 1024

MAX_BLIND_ROWS = 16
"""Context tokens that a draft which reads the target's hidden states runs without any. More than these are a
prompt that the target has not read yet."""


class DraftSession:
    """One request: its context, the rows computed for it, and the candidates known after them."""

    def __init__(self, cache: SessionCache, tenant: str, features: Features) -> None:
        self.context: list[int] = []
        self.rows = cache.new_rows()
        self.failed = False
        self.known: dict[int, Candidates] = {}  # by row
        self.features = features
        self.trust = INITIAL_TRUST  # in the hint's guesses, against the draft's own
        self.news: list[tuple[Candidates, int]] = []  # what was expected where, and the token that came
        self._observed: ProposeTask | None = None
        self.num_rows = 0  # computed for the present job
        self.num_passes = 0
        self._cache = cache
        self._tenant = tenant

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        """See `services.engine.Session`."""
        if not self.context and not len(self.rows):
            self.rows = self._cache.open(self.rows, self._tenant, token_ids)
            self.features.opened(self.rows.path_length)
        if base_length == len(self.context):
            self._compare(token_ids)
        self.context[base_length:] = token_ids
        self.features.truncate(base_length)
        move = self.rows.follow(self.context, base_length)
        if move is not None:
            self.features.moved(move)
            # Noise and penalties belong to a path, and so do candidates: only the path's end is still of use.
            end = move.sources[-1] if move.sources else move.unmoved - 1
            candidates = self.known.get(end)
            self.known = {} if candidates is None else {self.rows.path_length - 1: candidates}
        last = len(self.context) - 1
        if self.context and self.rows.path_length > last and last not in self.known:
            self._drop(last)
        self.num_rows = self.num_passes = 0

    def observe(self, task: ProposeTask) -> None:
        """Takes in what came with a task, once; drops rows that can be computed better now."""
        if task is self._observed:
            return
        self._observed = task
        self.features.put(task.observations, len(self.context))
        if task.observations and (settled := self.features.num_settled) < self.rows.path_length:
            self._drop(settled)

    def _drop(self, num_rows: int) -> None:
        self.rows.truncate(num_rows)
        self.features.dropped(num_rows)
        self.known.clear()

    def _compare(self, token_ids: Sequence[int]) -> None:
        """Learns from committed tokens who expected them."""
        row: int | None = len(self.context) - 1
        for token_id in token_ids:
            candidates = None if row is None else self.known.get(row)
            if row is None or candidates is None:
                return
            self.trust = update_trust(self.trust, candidates, token_id)
            self.news.append((candidates, token_id))
            row = self.rows.find(row, token_id)

    def close(self) -> None:
        """See `services.engine.Session`."""
        # What led to a fault may be in its rows. Only what no later observation could better is kept.
        self.rows.truncate(min(self.features.num_final, self.rows.path_length))
        self._cache.close(self.rows, None if self.failed else self._tenant)
        self.context = []
        self.known = {}

    def row_of(self, path: Sequence[int]) -> int | None:
        """The row at the end of a path of drafted tokens, if it is there."""
        row: int | None = len(self.context) - 1
        for token_id in path:
            assert row is not None
            row = self.rows.find(row, token_id)
            if row is None:
                return None
        return row

    def candidates_after(self, path: tuple[int, ...]) -> Candidates | None:
        """What is known to follow a path of drafted tokens."""
        row = self.row_of(path)
        return None if row is None else self.known.get(row)


DraftJob = Job[DraftSession, ProposeTask, Proposal]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one job runs in a pass: context tokens, and nodes of the hint if those end the prefill."""

    job: DraftJob
    segment: Segment
    num_context: int
    nodes: Sequence[int]  # the hint's nodes that get rows


class DraftEngine:
    """Runs a draft model."""

    def __init__(self, settings: DraftSettings) -> None:
        """Loads the model.

        Raises:
            UnservableModelError: It cannot be served; the text says why.
        """
        self._settings = settings
        self._model: DraftModel = load_draft(settings)
        self._loaded = self._model.loaded
        self._info = self._loaded.info
        self._info.kind = stage_pb2.STAGE_KIND_DRAFTER
        self._info.implementation = "draft"
        self._cache = new_cache(settings, self._loaded)
        # With noise, estimates are wrong in other ways than without.
        self._calibrations = {noisy: Calibration() for noisy in (False, True)}
        self._limits = PassLimits(MAX_PASS_ROWS, settings.prefill_chunk, settings.shared_prefill_chunk)

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

    def new_session(self, tenant: str = "") -> DraftSession:
        """See `services.engine.Engine`."""
        return DraftSession(self._cache, tenant, Features(self._model.target_hidden_size))

    def run(self, jobs: Sequence[DraftJob]) -> None:
        """See `services.engine.Engine`."""
        waiting: list[DraftJob] = []
        needs: list[Need] = []
        for job in jobs:
            self._prepare(job)
            num_missing = len(job.session.context) - job.session.rows.path_length
            if num_missing > MAX_BLIND_ROWS and not job.session.features.any:
                job.answer = Proposal(job.task.hint)
                continue
            unseen = self._unseen(job)
            if not num_missing and not unseen:
                self._conclude(job)
            elif self._reserve(job, len(unseen)):
                waiting.append(job)
                needs.append(Need(num_missing, job.arrived, job.task.hint, unseen))
        others_decode = self._cache.num_live > len(waiting)
        turns: list[_Turn] = []
        for share in share_pass(needs, self._limits, others_decode=others_decode):
            job = waiting[share.index]
            if share.num_context or share.nodes:
                turns.append(self._lay_out(job, share))
            else:  # the pass has no room for guesses
                self._conclude(job)
        if not turns:
            return
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
            session = turn.job.session
            session.num_rows += turn.segment.num_new
            session.num_passes += 1
            if session.rows.path_length == len(session.context):
                self._conclude(turn.job, turn, output)

    def _prepare(self, job: DraftJob) -> None:
        """Takes in what has happened since the last job of the session."""
        session = job.session
        session.observe(job.task)
        calibration = self._calibrations[job.task.sampling.temperature > 0.0]
        for candidates, token_id in session.news:
            calibration.learn_place(zip(candidates.token_ids, candidates.log_probs, strict=True), token_id)
        session.news.clear()

    def _lay_out(self, job: DraftJob, share: Share) -> _Turn:
        """Adds the rows of some context tokens and, at the end of the context, of unseen nodes."""
        session, num_context = job.session, share.num_context
        rows, context, hint = session.rows, session.context, job.task.hint
        first = rows.path_length
        if num_context:
            rows.truncate(first)
            rows.extend(context[first : first + num_context])
            session.features.computed(first, num_context)
        for node in share.nodes:
            path = _tokens(hint, node)
            parent = session.row_of(path[:-1])
            assert parent is not None, "parents come before children"
            rows.add(parent, path[-1])
        num_new = num_context + len(share.nodes)
        is_last = rows.path_length == len(context)
        wanted = range(max(0, num_context - 1), num_new) if is_last else range(0)
        inputs = None
        if self._model.inputs is not None:
            # Of drafted nodes the target has computed nothing yet.
            features, known = session.features.before(range(first, first + num_context))
            nodes = (0, 0, 0, len(share.nodes))
            inputs = self._model.inputs(
                rows.token_ids[-num_new:], pad(features, nodes), pad(known, nodes[2:])
            )
        return _Turn(job, Segment(rows, num_new, wanted, inputs), num_context, share.nodes)

    def _reserve(self, job: DraftJob, num_unseen: int) -> bool:
        """Makes sure of a job's memory before anything runs for it."""
        rows = job.session.rows
        try:
            self._cache.reserve(rows, max(len(rows), len(job.session.context)) + num_unseen)
        except RpcError as error:
            job.error = error
            return False
        return True

    def _conclude(self, job: DraftJob, turn: _Turn | None = None, output: Output | None = None) -> None:
        """Learns from the job's pass, if it took one, and answers. A fault stays with the job."""
        begin = time.perf_counter()
        try:
            if turn is not None and output is not None:
                self._learn(turn, output)
            job.answer = self._grow(job)
        except Exception as error:
            job.error = error
            job.session.failed = True
        job.spend("grow", time.perf_counter() - begin)

    def _unseen(self, job: DraftJob) -> list[int]:
        """The hint's nodes that have no row yet, as far as the context limit lets them have one."""
        session, hint = job.session, job.task.hint
        if not session.context:
            return []
        room = self._info.max_context_length - len(session.context)
        depths = hint.depths
        complete = session.rows.path_length == len(session.context)
        return [
            node
            for node in range(len(hint))
            if depths[node] < room and not (complete and session.row_of(_tokens(hint, node)) is not None)
        ][: self._info.max_nodes]

    def _learn(self, turn: _Turn, output: Output) -> None:
        """Keeps the candidates after the context's end and after each node that ran."""
        job, session = turn.job, turn.job.session
        hint, children = job.task.hint, job.task.hint.children()
        nodes = [ROOT, *turn.nodes] if turn.num_context else list(turn.nodes)
        places = []
        for node in nodes:
            path = _tokens(hint, node)
            guesses = {t: hint.log_probs[child] for t, child in children.get(node, {}).items()}
            places.append(Place(path, len(session.context) + len(path), guesses))
        logits = output.logits[:, : self._info.vocabulary_size]
        history = History(job.task.sampling, session.context)
        count = self._settings.num_candidates
        found = rank(logits, places, job.task.sampling, history, session.trust, count, self._model.token_ids)
        for place, candidates in zip(places, found, strict=True):
            row = session.row_of(place.path)
            assert row is not None
            session.known[row] = candidates

    def _grow(self, job: DraftJob) -> Proposal:
        """Grows the tree from what is known."""
        session, task = job.session, job.task
        if not session.context:
            return Proposal(EMPTY_DRAFT)
        calibration = self._calibrations[task.sampling.temperature > 0.0]

        def known(path: tuple[int, ...]) -> Candidates | None:
            candidates = session.candidates_after(path)
            return None if candidates is None else calibrated(candidates, calibration)

        growth = grow(known, task.hint, task.budget, task.drafter_index)
        return Proposal(growth.draft, growth.next_round_gain, session.num_passes, session.num_rows)


def _tokens(hint: DraftTree, node: int) -> tuple[int, ...]:
    """Tokens from the root's child down to a node; none for `ROOT`."""
    return () if node == ROOT else tuple(hint.token_ids[n] for n in hint.path(node))
