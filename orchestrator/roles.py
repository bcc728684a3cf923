"""What the decode loop asks of the stages: a drafter proposes a draft, the verifier gives a verdict.

These are the loop's own words; how a stage is reached is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stagespec.tree import DraftTree
from stagespec.v1.verifier_pb2 import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one draft, and prices in expected committed tokens.

    Attributes:
        max_nodes: Most nodes, the hint's included.
        max_depth: Most levels.
        node_price: Cost of one more node in the verifier's pass.
        pass_price: Cost of one more pass of a drafter's model.
        max_children: Most children of one node; None for no limit.
    """

    max_nodes: int
    max_depth: int
    node_price: float
    pass_price: float
    max_children: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether a draft may have any node at all."""
        return self.max_nodes > 0 and self.max_depth > 0


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far drafts of one request may grow.

    Attributes:
        max_nodes: Most nodes in a draft.
        max_depth: Most levels in a draft.
        max_rounds: Most rounds over the drafters in a step.
        node_price: See `Budget`.
        pass_price: See `Budget`.
        max_context_length: What the verifier holds, drafted nodes included; None for no limit.
        max_children: Most children of one node; None for no limit.
        fixed_size: Whether drafts grow to these limits whatever that costs; the prices are not used then.
    """

    max_nodes: int
    max_depth: int
    max_rounds: int
    node_price: float
    pass_price: float
    max_context_length: int | None = None
    max_children: int | None = None
    fixed_size: bool = False

    def budget(self, context_length: int, num_left: int) -> Budget:
        """The budget of the next draft.

        Args:
            context_length: Tokens of the context.
            num_left: Tokens that may still be generated; the last of them is always the target's own.
        """
        max_nodes, max_depth = self.max_nodes, min(self.max_depth, num_left - 1)
        if self.max_context_length is not None:
            max_nodes = min(max_nodes, self.max_context_length - context_length)
        if self.max_children == 1:
            max_nodes = min(max_nodes, max_depth)  # A chain has one node a level.
        node_price, pass_price = (0.0, 0.0) if self.fixed_size else (self.node_price, self.pass_price)
        return Budget(max_nodes, max_depth, node_price, pass_price, self.max_children)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's answer.

    Attributes:
        draft: What was kept of the hint, and what was added.
        next_round_gain: Committed tokens that another round would be expected to add; 0 for none.
    """

    draft: DraftTree
    next_round_gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's decision on one draft.

    Attributes:
        token_ids: The committed tokens: accepted drafts in order, then the bonus token.
        accepted_nodes: The accepted path, as nodes of the draft. Never counts the bonus token.
        logprobs: One entry for each of `token_ids`, if the request asked for them.
    """

    token_ids: tuple[int, ...]
    accepted_nodes: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class Drafter(Protocol):
    """A stage that guesses. It never fails: what it cannot answer is its hint, unchanged."""

    async def propose(
        self, context: Sequence[int], hint: DraftTree, budget: Budget, step_id: int, round_number: int
    ) -> Proposal:
        """Keeps, extends or prunes `hint`, a draft that continues `context`."""


class Verifier(Protocol):
    """The stage that decides."""

    async def verify(self, context: Sequence[int], draft: DraftTree, step_id: int) -> Verdict:
        """Checks `draft` against the target.

        Raises:
            RpcError: The target is lost, or cannot decide.
        """
