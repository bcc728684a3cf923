"""What a draft session knows of the target's hidden states, and which of its rows were computed with them.

It knows positions and rows by number; it computes nothing.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.causal_lm.rows import Move
from services.element_types import DTYPES
from stagespec.v1.observation_pb2 import Observation


class Features:
    """Hidden states by position of a session's context.

    The row of the token at position i reads the hidden state of position i - 1. A row of the path that was
    computed without one is computed again once it is there.
    """

    def __init__(self, width: int) -> None:
        """Knows nothing yet.

        Args:
            width: Of a hidden state; 0 for a draft that reads none, whose rows are all as they should be.
        """
        self._width = width
        self._values = torch.zeros(0, width, dtype=torch.float16)
        self._known = torch.zeros(0, dtype=torch.bool)
        self._with: list[bool] = []  # for each row of the path whether it was computed with what it reads

    @property
    def any(self) -> bool:
        """Whether any hidden state is known, or none is needed."""
        return not self._width or bool(self._known.any())

    def put(self, observations: Iterable[Observation], length: int) -> None:
        """Takes in what the target computed. What cannot be meant for this draft is left out.

        Args:
            observations: Of any positions, in any order.
            length: Tokens of the context; what lies beyond is left out.
        """
        for observation in observations if self._width else ():
            dtype, count = DTYPES.get(observation.element_type), observation.num_positions
            first = observation.first_position
            if dtype is None or count < 1 or first < 0 or first + count > length:
                continue
            if len(observation.hidden_states) != count * self._width * dtype.itemsize:
                continue
            values = torch.frombuffer(bytearray(observation.hidden_states), dtype=dtype)
            values = values.view(count, self._width)
            self._reserve(first + count)
            self._values[first : first + count] = values.half()
            self._known[first : first + count] = values.isfinite().all(dim=1)

    def truncate(self, length: int) -> None:
        """Forgets the hidden states from a position on: other tokens come there."""
        self._known[length:] = False

    def before(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the rows at some positions read, [n, width], and where that is known, [n]."""
        self._reserve(max(1, *positions) if positions else 1)
        earlier = torch.tensor(positions, dtype=torch.long) - 1
        places = earlier.clamp_min(0)
        return self._values[places], self._known[places] & (earlier >= 0)

    def opened(self, num_rows: int) -> None:
        """Begins with rows of an earlier session, which gave away only such as were as they should be."""
        self._with = [True] * num_rows

    def dropped(self, first: int) -> None:
        """Notes that the path's rows from one on are gone."""
        del self._with[first:]

    def computed(self, first: int, num_rows: int) -> None:
        """Notes that rows were added to the path with what is known now."""
        del self._with[first:]
        if not self._width:  # there is nothing to look up
            self._with += [True] * num_rows
            return
        _, known = self.before(range(first, first + num_rows))
        self._with += [position == 0 or bool(k) for position, k in enumerate(known.tolist(), start=first)]

    def moved(self, move: Move) -> None:
        """Follows rows: drafted ones, which had nothing to read, may have joined the path."""
        length = move.unmoved + len(move.sources)
        del self._with[move.unmoved :]
        self._with += [False] * (length - len(self._with))

    @property
    def num_final(self) -> int:
        """Rows at the path's begin that were computed with all they read."""
        if not self._width:
            return len(self._with)
        return next((row for row, complete in enumerate(self._with) if not complete), len(self._with))

    @property
    def num_settled(self) -> int:
        """Rows at the path's begin that there is nothing better to compute for."""
        if not self._width:
            return len(self._with)
        _, known = self.before(range(len(self._with)))
        pairs = zip(self._with, known.tolist(), strict=True)
        return next((row for row, (done, k) in enumerate(pairs) if k and not done), len(self._with))

    def _reserve(self, length: int) -> None:
        more = length - len(self._known)
        if more > 0:
            more = max(more, len(self._known) // 2)
            self._values = torch.cat([self._values, self._empty(more)])
            self._known = torch.cat([self._known, torch.zeros(more, dtype=torch.bool)])

    def _empty(self, count: int) -> Tensor:
        return torch.zeros(count, self._width, dtype=torch.float16)
