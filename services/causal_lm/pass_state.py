"""What passes between the pieces of a lean pass: one row of each tensor for every row of the pass."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

from torch import Tensor

from services.causal_lm.weights import Weights


@dataclass(slots=True)
class PassState:
    """Tensors that a piece reads, and changes or replaces.

    Attributes:
        token_ids: [n]
        positions: [n]
        attended: What a layer's attention gave. [n, num_heads, head_dim]
        x: Input of a layer, then its output. [n, hidden]
        qkv: A layer's queries, then keys, then values. [n, num_heads + 2 * num_kv_heads, head_dim]
        cosines: Of the rotary positions, or None. [n, 1, head_dim]
        sines: Likewise.
        given: What the first layer reads instead of the tokens' embeddings, or None. [n, hidden]
    """

    token_ids: Tensor
    positions: Tensor
    attended: Tensor
    x: Tensor = field(init=False)
    qkv: Tensor = field(init=False)
    cosines: Tensor | None = None
    sines: Tensor | None = None
    given: Tensor | None = None

    def fill(self, token_ids: Tensor, positions: Tensor) -> None:
        """Sets what the first rows are. The others become token 0 at position 0, which every model has."""
        for own, values in ((self.token_ids, token_ids), (self.positions, positions)):
            own[: len(values)] = values
            own[len(values) :] = 0


def begun_state(weights: Weights, token_ids: Tensor, positions: Tensor) -> PassState:
    """The state of a pass before its first piece.

    Args:
        weights: The model's.
        token_ids: [n]
        positions: [n]
    """
    shape = len(token_ids), weights.num_heads, weights.head_dim
    return PassState(token_ids, positions, weights.embedding.new_empty(shape))


def fixed_states(weights: Weights, sizes: tuple[int, ...]) -> dict[int, PassState]:
    """States that are whole from the start and lie in the same memory, by their number of rows."""
    largest = max(sizes)
    num_heads, num_kv_heads, head_dim = weights.num_heads, weights.num_kv_heads, weights.head_dim

    def rows(*shape: int) -> Tensor:
        return weights.embedding.new_zeros(largest, *shape)

    token_ids, positions = (rows().long() for _ in range(2))
    x, attended = rows(weights.embedding.shape[1]), rows(num_heads, head_dim)
    qkv = rows(num_heads + 2 * num_kv_heads, head_dim)
    cosines, sines = (rows(1, head_dim) for _ in range(2))
    states = {}
    for size in sizes:
        state = states[size] = PassState(token_ids[:size], positions[:size], attended[:size])
        state.x, state.qkv = x[:size], qkv[:size]
        if weights.cosines is not None:
            state.cosines, state.sines = cosines[:size], sines[:size]
    return states


def run_in_place(piece: Callable[[PassState], None], state: PassState) -> None:
    """Runs a piece and puts what it replaced where the state's own tensors are."""
    after = copy(state)
    piece(after)
    for name in ("x", "qkv", "cosines", "sines"):
        own, new = getattr(state, name), getattr(after, name)
        if new is not own:
            own.copy_(new)
