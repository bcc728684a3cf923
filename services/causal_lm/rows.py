"""One session's key and value rows: the context's in order, then those of drafted nodes.

A row belongs to a token path, not to a step: when the context grows along drafted nodes, their rows become
the context's without being computed again. It does not know models; keys and values are opaque tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_ROW = -1
"""Parent of the first context token's row."""

_MIN_CAPACITY = 128


@dataclass(frozen=True, slots=True)
class Move:
    """What became of the rows when the context moved.

    Attributes:
        unmoved: Rows before this one stayed where they were.
        sources: For each row after them, the row it was.
    """

    unmoved: int
    sources: tuple[int, ...]


class Rows:
    """Rows of one session. Row i is the forward pass at one token, given the path that leads to it."""

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Makes an empty store.

        Args:
            num_layers: Layers of the model.
            num_heads: Key-value heads of a layer.
            head_dim: Width of a key and of a value.
            device: Where the rows live.
            dtype: Their number format.
        """
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.path_length = 0  # the first rows are the context's, each the child of the one before
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> row, beyond the path
        shape = (num_layers, num_heads, 0, head_dim)  # the third is the capacity
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)

    def __len__(self) -> int:
        return len(self.token_ids)

    def find(self, parent: int, token_id: int) -> int | None:
        """The row of a token after `parent`, if it is there."""
        row = parent + 1
        if row < self.path_length and self.token_ids[row] == token_id:
            return row
        return self._children.get((parent, token_id))

    def add(self, parent: int, token_id: int) -> int:
        """Makes room for one more row, whose keys and values the next forward pass fills."""
        row = len(self.token_ids)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self._children[parent, token_id] = row
        if row >= self.keys.shape[2]:
            self._reserve(max(_MIN_CAPACITY, 2 * self.keys.shape[2], row + 1))
        return row

    def position(self, row: int) -> int:
        """Position of a row's token in its sequence."""
        depth = 0
        while row >= self.path_length:
            row = self.parents[row]
            depth += 1
        return row + depth

    def follow(self, context: Sequence[int]) -> Move | None:
        """Makes the path as long a prefix of `context` as there are rows for, and drops what left it.

        Rows of drafted nodes stay while the context is what it was: the next round may need them. Once the
        context moves, those on its path join the path and the others go.

        Args:
            context: All tokens of the context.

        Returns:
            What became of the rows; None if nothing moved.
        """
        unmoved = _common_prefix(self.token_ids, context, min(self.path_length, len(context)))
        row = unmoved - 1
        sources = []
        for token_id in context[unmoved:]:
            child = self.find(row, token_id)
            if child is None:
                break
            sources.append(child)
            row = child
        length = unmoved + len(sources)
        if length == self.path_length == len(context):
            return None
        if sources and sources != list(range(unmoved, length)):
            index = torch.tensor(sources, device=self.keys.device)
            for store in (self.keys, self.values):
                store[:, :, unmoved:length] = store.index_select(2, index)
        self.token_ids[unmoved:] = context[unmoved:length]
        self.parents[unmoved:] = range(unmoved - 1, length - 1)
        self._children.clear()
        self.path_length = length
        return Move(unmoved, tuple(sources))

    def truncate(self, num_rows: int) -> None:
        """Drops the last rows, down to `num_rows`."""
        for row in range(max(num_rows, self.path_length), len(self.token_ids)):
            del self._children[self.parents[row], self.token_ids[row]]
        del self.token_ids[num_rows:], self.parents[num_rows:]
        self.path_length = min(self.path_length, num_rows)

    def grow_path(self, num_rows: int) -> None:
        """Declares that the first `num_rows` rows are the context's."""
        for row in range(self.path_length, num_rows):
            assert self.parents[row] == row - 1, "a context row must follow the one before"
            del self._children[row - 1, self.token_ids[row]]
        self.path_length = num_rows

    def visibility(self, rows: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which rows each of `rows` attends to: its ancestors and itself. [len(rows), len(self)]."""
        mask = np.zeros((len(rows), len(self.token_ids)), dtype=np.bool_)
        for index, row in enumerate(rows):
            while row >= self.path_length:
                mask[index, row] = True
                row = self.parents[row]
            mask[index, : row + 1] = True
        return mask

    def _reserve(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(old.shape[0], old.shape[1], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)


def _common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`."""
    if list(a[:limit]) == list(b[:limit]):
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
