"""What a forward pass over token trees of several sessions takes and gives, however it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.causal_lm.rows import Rows


@dataclass(frozen=True, slots=True)
class Segment:
    """New rows of one session, to be computed.

    Attributes:
        rows: The session's store; the new rows are its last ones.
        num_new: How many.
        wanted: Which of them need logits, as indices from 0.
        inputs: What the first layer reads for each new row, in float32, instead of its token's embedding; for
            all segments of a pass or for none. [num_new, hidden]
    """

    rows: Rows
    num_new: int
    wanted: Sequence[int]
    inputs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Results of a pass for one segment.

    Attributes:
        logits: Of the wanted rows, in float32. [num_wanted, vocab]
        hidden_states: Of all new rows, after the final normalisation. [num_new, hidden]
    """

    logits: Tensor
    hidden_states: Tensor


def given_inputs(segments: Sequence[Segment]) -> Tensor | None:
    """The inputs of all segments of a pass together, [n, hidden], if they have any."""
    found = [segment.inputs for segment in segments if segment.inputs is not None]
    assert len(found) in (0, len(segments)), "all segments of a pass have inputs, or none"
    return torch.cat(found) if found else None


class Forward(Protocol):
    """A model's forward pass. A row sees its ancestors and itself, and nothing else of the pass."""

    def new_rows(self) -> Rows:
        """An empty store of rows for one session."""

    def __call__(self, segments: Sequence[Segment]) -> list[Output]:
        """Computes the new rows of every segment, and stores their keys and values.

        Args:
            segments: At least one, each with at least one new row.

        Returns:
            One output a segment.
        """
