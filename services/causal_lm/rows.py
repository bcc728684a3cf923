"""One session's key and value rows: the context's in order, then those of drafted nodes.

A row belongs to a token path, not to a step: when the context grows along drafted nodes, their rows become
the context's without being computed again. It does not know models; keys and values are opaque tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_ROW = -1
"""Parent of the first context token's row."""

BLOCK = 128
"""Rows by which capacity grows. Every step reads all rows, so copying them once in so many steps is cheap."""


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
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        key_block: int = 1,
    ) -> None:
        """Makes an empty store.

        Args:
            num_layers: Layers of the model.
            num_heads: Key-value heads of a layer.
            head_dim: Width of a key and of a value.
            device: Where the rows live.
            dtype: Their number format.
            key_block: Keys that are stored together, dimension by dimension. Capacity is a multiple of it.
        """
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.path_length = 0  # the first rows are the context's, each the child of the one before
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> row, beyond the path
        self._key_block = key_block
        self._step = math.lcm(BLOCK, key_block)
        # The third dimension is the capacity; of the keys, in blocks.
        shape = (num_layers, num_heads, 0, head_dim)
        self.keys = torch.empty((*shape, key_block), device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.values.shape[2]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        layers, heads, _, width = self.values.shape
        return layers * heads * (self.keys.shape[3] + width) * self.values.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken, whether or not all rows are in use."""
        return self.capacity * self.row_bytes

    def capacity_for(self, num_rows: int) -> int:
        """The capacity that so many rows take."""
        return -(-num_rows // self._step) * self._step

    def reserve(self, num_rows: int) -> None:
        """Takes memory for so many rows in all, if there is less."""
        if num_rows > self.capacity:
            self._resize(self.capacity_for(num_rows))

    def release(self) -> None:
        """Drops all rows and gives their memory back."""
        self.truncate(0)
        self._resize(0)

    def fork(self, num_rows: int, capacity: int) -> "Rows":
        """A copy of the first rows of the path, with room for `capacity` rows or more."""
        assert num_rows <= self.path_length
        layers, heads, _, width = self.values.shape
        copy = Rows(layers, heads, width, self.values.device, self.values.dtype, self._key_block)
        copy.reserve(max(num_rows, capacity))
        num_blocks = -(-num_rows // self._key_block)
        copy.keys[:, :, :num_blocks] = self.keys[:, :, :num_blocks]
        copy.values[:, :, :num_rows] = self.values[:, :, :num_rows]
        copy.extend(self.token_ids[:num_rows])
        return copy

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
        self.reserve(row + 1)
        return row

    def extend(self, token_ids: Sequence[int]) -> None:
        """Makes room for the context's next tokens, after which nothing is drafted yet."""
        length = len(self.token_ids)
        assert length == self.path_length, "drafted rows must go before the context grows"
        self.token_ids += token_ids
        self.parents += range(length - 1, len(self.token_ids) - 1)
        self.path_length = len(self.token_ids)
        self.reserve(self.path_length)

    def position(self, row: int) -> int:
        """Position of a row's token in its sequence."""
        depth = 0
        while row >= self.path_length:
            row = self.parents[row]
            depth += 1
        return row + depth

    def follow(self, context: Sequence[int], unchanged: int = 0) -> Move | None:
        """Makes the path as long a prefix of `context` as there are rows for, and drops what left it.

        Rows of drafted nodes stay while the context is what it was: the next round may need them. Once the
        context moves, those on its path join the path and the others go.

        Args:
            context: All tokens of the context.
            unchanged: How many of its first tokens are what the path was last told. They are not looked at.

        Returns:
            What became of the rows; None if nothing moved.
        """
        unmoved = min(unchanged, self.path_length, len(context))
        row = unmoved - 1
        sources: list[int] = []
        for index in range(unmoved, len(context)):
            child = self.find(row, context[index])
            if child is None:
                break
            if child == unmoved:
                unmoved += 1
            else:
                sources.append(child)
            row = child
        length = unmoved + len(sources)
        if length == self.path_length == len(context):
            return None
        if sources:
            device = self.keys.device
            self._move(torch.tensor(sources, device=device), torch.arange(unmoved, length, device=device))
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
        index = np.asarray(rows, dtype=np.int64)
        # What a row on the path sees; of the others, all that precedes their branch is added below.
        mask = np.arange(len(self.token_ids)) <= np.where(index < self.path_length, index, -1)[:, None]
        for place in np.flatnonzero(index >= self.path_length).tolist():
            row = rows[place]
            while row >= self.path_length:
                mask[place, row] = True
                row = self.parents[row]
            mask[place, : row + 1] = True
        return mask

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        block = self._key_block
        self.values[:, :, targets] = self.values[:, :, sources]
        self.keys[:, :, targets // block, :, targets % block] = self.keys[
            :, :, sources // block, :, sources % block
        ]

    def _resize(self, capacity: int) -> None:
        blocks = -(-capacity // self._key_block)
        self.keys = _resized(self.keys, blocks)
        self.values = _resized(self.values, blocks * self._key_block)


def _resized(old: Tensor, length: int) -> Tensor:
    """A copy with another length of its third dimension."""
    new = old.new_empty(*old.shape[:2], length, *old.shape[3:])
    kept = min(length, old.shape[2])
    new[:, :, :kept] = old[:, :, :kept]
    return new
