"""What the n-gram stage can be told."""

from dataclasses import dataclass

MIN_ORDER, MAX_ORDER = 2, 5
MAX_CONTEXT_ORDER = 32


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """What the drafter guesses from.

    Attributes:
        table: File made by `stagespec build-ngram`; None to guess from each session's own context alone.
        order: Length of the longest n-grams to use from the table, which must have them.
        context_order: Length of the longest n-grams to match in the session's own context.
        context_weight: Share of the session's own context in each probability; the table has the rest.
        max_sessions: Most sessions at once.
        max_nodes: Most nodes in a draft, whatever the request's budget.
    """

    table: str | None = None
    order: int = 3
    context_order: int = 8
    context_weight: float = 0.8
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
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions is {self.max_sessions} and must be at least 1")
        if self.max_nodes < 1:
            raise ValueError(f"max_nodes is {self.max_nodes} and must be at least 1")
