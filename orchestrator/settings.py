"""The orchestrator's settings: how much to speculate, whom to admit, how long to wait.

Values are checked here, so that a bad one stops the start with its name. Where they come from (a file, a
test) is not known here.
"""

from dataclasses import dataclass, field


def _require(setting: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails too
        raise ValueError(f"{setting} is {value}; it must be from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How far a draft may grow, and what growing it costs.

    Attributes:
        max_nodes: Most nodes in a draft, unless the request says otherwise.
        max_request_nodes: Most nodes a request may ask for.
        max_depth: Most levels in a draft.
        max_rounds: Most passes over the drafters in a step.
        node_price: Committed tokens that one more node in the verifier's pass costs.
        pass_price: Committed tokens that one more pass of a drafter's model costs.
    """

    max_nodes: int = 24
    max_request_nodes: int = 256
    max_depth: int = 8
    max_rounds: int = 4
    node_price: float = 0.02
    pass_price: float = 0.2

    def __post_init__(self) -> None:
        _require("speculation.max_request_nodes", self.max_request_nodes, 1, 4096)
        _require("speculation.max_nodes", self.max_nodes, 1, self.max_request_nodes)
        _require("speculation.max_depth", self.max_depth, 1, 4096)
        _require("speculation.max_rounds", self.max_rounds, 1, 64)
        _require("speculation.node_price", self.node_price, 0, 100)
        _require("speculation.pass_price", self.pass_price, 0, 100)


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How many requests are taken at once.

    Attributes:
        max_concurrent_requests: Requests generated at the same time, if the verifier has as many sessions.
        max_waiting_requests: Requests that may wait for their turn; more are refused.
        default_max_tokens: Tokens to generate when a request does not say.
    """

    max_concurrent_requests: int = 8
    max_waiting_requests: int = 64
    default_max_tokens: int = 256

    def __post_init__(self) -> None:
        _require("admission.max_concurrent_requests", self.max_concurrent_requests, 1, 100_000)
        _require("admission.max_waiting_requests", self.max_waiting_requests, 0, 100_000)
        _require("admission.default_max_tokens", self.default_max_tokens, 1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class TimeoutSettings:
    """How long to wait for whom, in seconds.

    Attributes:
        propose_s: For a drafter's answer, when its context is up to date.
        propose_per_token_s: More for each context token that the drafter has yet to read.
        late_reply_s: For an overdue drafter's answer, before its stream is opened anew.
        verify_s: For a verdict, when the verifier's context is up to date.
        verify_per_token_s: More for each context token that the verifier has yet to read.
        verifier_recovery_s: For a lost verifier to come back, before the request fails.
        admission_s: For a request's turn, before it is refused.
        connect_s: For each stage to answer when the orchestrator starts.
        check_s: For a stage to say what it is, while the orchestrator runs.
        backoff_s: Before the first attempt to reopen a failed stream; doubled each time.
        max_backoff_s: Most to wait before such an attempt.
    """

    propose_s: float = 2.0
    propose_per_token_s: float = 0.01
    late_reply_s: float = 30.0
    verify_s: float = 30.0
    verify_per_token_s: float = 0.05
    verifier_recovery_s: float = 60.0
    admission_s: float = 60.0
    connect_s: float = 60.0
    check_s: float = 5.0
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("propose_s", "late_reply_s", "verify_s", "connect_s", "check_s", "backoff_s"):
            _require(f"timeouts.{name}", getattr(self, name), 0.001, 3600)
        for name in ("propose_per_token_s", "verify_per_token_s", "verifier_recovery_s", "admission_s"):
            _require(f"timeouts.{name}", getattr(self, name), 0, 3600)
        _require("timeouts.max_backoff_s", self.max_backoff_s, self.backoff_s, 3600)


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """All of the above."""

    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
