"""What a stage's host asks of the stage: sessions, and turns of work on batches of jobs.

It does not know gRPC, threads or models. An engine is used by one worker thread; only `info`, `counters` and
`new_session` are called from elsewhere.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from stagespec.tree import DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.observation_pb2 import Observation, ObservationRequest
from stagespec.v1.sampling_pb2 import SamplingParams
from stagespec.v1.stage_pb2 import StageInfo
from stagespec.v1.verifier_pb2 import TokenLogprobs
from stagespec.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ProposeTask:
    """What one ProposeRequest asks, once the context is up to date.

    Attributes:
        sampling: The request's sampling, as advice.
        hint: The draft so far, repaired.
        budget: Limits and prices.
        drafter_index: Owner to write on this drafter's own nodes.
        observations: What the target computed since the last request.
    """

    sampling: SamplingParams
    hint: DraftTree
    budget: Budget
    drafter_index: int = 0
    observations: Sequence[Observation] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's answer.

    Attributes:
        draft: What was kept of the hint, and what was added.
        next_round_gain: Committed tokens that another round would be expected to add.
        num_passes: Forward passes of a model.
        num_rows: Rows computed in them.
    """

    draft: DraftTree
    next_round_gain: float = 0.0
    num_passes: int = 0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """What one VerifyRequest asks, once the context is up to date."""

    sampling: SamplingParams
    draft: DraftTree
    num_logprobs: int | None = None
    observations: ObservationRequest = field(default_factory=ObservationRequest)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer.

    Attributes:
        accepted_nodes: The accepted path, as nodes of the task's draft.
        token_ids: Tokens of the accepted path, then the bonus token.
        logprobs: One entry for each of `token_ids`, if asked for.
        num_nodes: Nodes of the draft that ran.
        num_rows: Rows computed for this task.
        num_batched_sessions: Sessions in the last forward pass.
        observations: What was asked to be observed.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_nodes: int = 0
    num_rows: int = 0
    num_batched_sessions: int = 1
    observations: tuple[Observation, ...] = ()


class Session(Protocol):
    """One request's state in a stage."""

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Truncates the context to `base_length`, which it has at least, then appends `token_ids`."""

    def close(self) -> None:
        """Frees what the session holds."""


SessionT = TypeVar("SessionT", bound=Session)
TaskT = TypeVar("TaskT")
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, eq=False)
class Job(Generic[SessionT, TaskT, AnswerT]):
    """One request on its way through an engine.

    The engine adds the seconds it spends to `seconds`, under "sync", "forward", "grow" and "accept", and ends
    the job by setting `answer` or `error`. A job with neither gets another turn.

    Attributes:
        session: Whose request it is.
        task: What is asked.
        base_length: Context length to truncate to before the task.
        token_ids: Tokens to append then.
        answer: Set by the engine when it is through.
        error: Set instead when it failed.
        seconds: Time spent, by part.
        arrived: When the request came in.
        begun: Whether the context is up to date.
    """

    session: SessionT
    task: TaskT
    base_length: int = 0
    token_ids: Sequence[int] = ()
    answer: AnswerT | None = None
    error: Exception | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    arrived: float = field(default_factory=time.perf_counter)
    begun: bool = False

    def spend(self, part: str, seconds: float) -> None:
        """Books time under a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def done(self) -> bool:
        """Whether the engine is through with it."""
        return self.answer is not None or self.error is not None


class Engine(Protocol[SessionT, TaskT, AnswerT]):
    """A stage without its transport."""

    @property
    def info(self) -> StageInfo:
        """What the stage is and its limits; the host fills in process, start time and name."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary, or None if any will do."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What the engine itself counts, named as in GetStatsResponse."""

    def new_session(self, tenant: str = "") -> SessionT:
        """A session with an empty context, of which nothing may reach another tenant's."""

    def run(self, jobs: Sequence[Job[SessionT, TaskT, AnswerT]]) -> None:
        """Takes every job at least one turn further: a whole answer, or one chunk of a long prefill.

        One job's fault is set on that job alone.
        """
