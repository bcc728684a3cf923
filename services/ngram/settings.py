"""What the n-gram stage can be told."""

from dataclasses import dataclass

from services.ngram.memory import MIN_MATCH

MIN_ORDER, MAX_ORDER = 2, 5
MAX_CONTEXT_ORDER = 32
MEMORY_SCOPES = ("request", "tenant", "shared")
MAX_MEMORY_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """What the drafter guesses from.

    Attributes:
        table: File made by `stagespec build-ngram`; None to guess from each session's own context alone.
        order: Length of the longest n-grams to use from the table, which must have them.
        context_order: Length of the longest n-grams to match in the session's own context, and in the
            memory's texts.
        context_weight: Share of the session's own context and the memory's texts in each probability; the
            table has the rest.
        memory_scope: Whose earlier texts, prompts among them, are looked at beside a session's own context:
            "request": nobody's, and nothing is kept; "tenant": those of the same tenant, none for requests
            that name no tenant; "shared": those of everybody who uses the stage, who must trust each other.
        memory_tokens: Most tokens of all texts that are kept; the oldest texts make room. Up to 52 bytes
            each.
        max_document_tokens: Of a longer text only the last so many tokens are kept.
        max_sessions: Most sessions at once.
        max_nodes: Most nodes in a draft, whatever the request's budget.
    """

    table: str | None = None
    order: int = 3
    context_order: int = 8
    context_weight: float = 0.8
    memory_scope: str = "request"
    memory_tokens: int = 1_000_000
    max_document_tokens: int = 8192
    max_sessions: int = 64
    max_nodes: int = 256

    def __post_init__(self) -> None:
        if self.table == "":
            raise ValueError("table is empty: name a file, or leave it out to use no table")
        if not MIN_ORDER <= self.order <= MAX_ORDER:
            raise ValueError(f"order is {self.order} and must be from {MIN_ORDER} to {MAX_ORDER}")
        if not MIN_ORDER <= self.context_order <= MAX_CONTEXT_ORDER:
            raise ValueError(
                f"context_order is {self.context_order} and must be from {MIN_ORDER} to {MAX_CONTEXT_ORDER}"
            )
        if not 0.0 <= self.context_weight <= 1.0:
            raise ValueError(f"context_weight is {self.context_weight} and must be from 0 to 1")
        if self.memory_scope not in MEMORY_SCOPES:
            raise ValueError(
                f"memory_scope is {self.memory_scope!r} and must be one of {', '.join(MEMORY_SCOPES)}"
            )
        if self.memory_scope != "request" and self.context_order <= MIN_MATCH:
            raise ValueError(
                f"context_order is {self.context_order} and must be at least {MIN_MATCH + 1} "
                f"with memory_scope {self.memory_scope!r}, which matches {MIN_MATCH} tokens or more"
            )
        if not MIN_MATCH < self.max_document_tokens < self.memory_tokens:
            raise ValueError(
                f"max_document_tokens is {self.max_document_tokens} and must be at least {MIN_MATCH + 1} "
                f"and below memory_tokens, which is {self.memory_tokens}"
            )
        if self.memory_tokens > MAX_MEMORY_TOKENS:
            raise ValueError(f"memory_tokens is {self.memory_tokens} and must be at most {MAX_MEMORY_TOKENS}")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions is {self.max_sessions} and must be at least 1")
        if self.max_nodes < 1:
            raise ValueError(f"max_nodes is {self.max_nodes} and must be at least 1")
