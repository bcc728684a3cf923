"""The n-gram stage without its transport: opens the table once, then answers jobs one after the other.

It knows the engine's interface and no other stage.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from services.calibration import Calibration
from services.engine import Job, Proposal, ProposeTask
from services.ngram.growth import grow, learn
from services.ngram.memory import SuffixMemory
from services.ngram.mixture import Mixture
from services.ngram.session import NgramSession
from services.ngram.settings import NgramSettings
from services.ngram.table import NgramTable
from stagespec.tree import DraftTree
from stagespec.v1 import stage_pb2
from stagespec.vocabulary import Vocabulary

NgramJob = Job[NgramSession, ProposeTask, Proposal]


class NgramEngine:
    """Drafts from n-grams of the session's own context, of a table, and of earlier texts where allowed."""

    def __init__(self, settings: NgramSettings) -> None:
        """Opens the table, if there is one.

        Raises:
            TableError: It cannot be read, is damaged, or has a lower order than the settings ask for.
        """
        table = NgramTable(Path(settings.table), order=settings.order) if settings.table is not None else None
        self._mixture = Mixture(
            table, context_order=settings.context_order, context_weight=settings.context_weight
        )
        # Knowing the noise makes for other errors than guessing the likeliest token.
        self._calibrations = {noisy: Calibration() for noisy in (False, True)}
        self._scope = settings.memory_scope
        self._memory: SuffixMemory | None = None
        if self._scope != "request":
            self._memory = SuffixMemory(settings.memory_tokens, settings.max_document_tokens)
        self._info = stage_pb2.StageInfo(
            kind=stage_pb2.STAGE_KIND_DRAFTER,
            implementation="ngram",
            model=settings.table if settings.table is not None else "context only",
            device="cpu",
            dtype="float64",
            weight_format="counts",
            tokenizer_hash=table.tokenizer_hash if table else "",
            vocabulary_size=table.vocabulary_size if table else 0,
            max_nodes=settings.max_nodes,
            max_sessions=settings.max_sessions,
            can_rollback=True,
            weight_bytes=table.num_bytes if table else 0,
            cache_bytes_per_token=8,
            num_threads=1,
        )

    @property
    def info(self) -> stage_pb2.StageInfo:
        """See `services.engine.Engine`."""
        return self._info

    @property
    def vocabulary(self) -> Vocabulary | None:
        """None: the table knows the vocabulary's hash and size, not its bytes."""
        return None

    @property
    def counters(self) -> dict[str, int]:
        """What the memory holds, and how many lookups it had something for."""
        memory = self._memory
        if memory is None:
            return {}
        return {
            "memory_documents_live": memory.num_documents,
            "memory_tokens_live": memory.num_tokens,
            "memory_hits_total": memory.num_hits,
        }

    def new_session(self, tenant: str = "") -> NgramSession:
        """See `services.engine.Engine`. What the scope allows of the memory is up to the tenant."""
        if self._scope == "shared":
            return NgramSession(self._memory)
        if self._scope == "tenant" and tenant:  # requests without a tenant may be anybody's
            return NgramSession(self._memory, tenant)
        return NgramSession()

    def run(self, jobs: Sequence[NgramJob]) -> None:
        """See `services.engine.Engine`."""
        for job in jobs:
            begin = time.perf_counter()
            try:
                job.answer = Proposal(self._draft(job.session, job.task))
            except Exception as error:
                job.error = error
            job.spend("grow", time.perf_counter() - begin)

    def _draft(self, session: NgramSession, task: ProposeTask) -> DraftTree:
        if session.drafted is not None:
            learn(self._calibrations[session.drafted.noisy], session)
        return grow(self._mixture, session, task, self._calibrations[task.sampling.temperature > 0.0])
