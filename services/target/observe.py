"""Packs what a verify pass computed into observations for the drafters that asked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.element_types import DTYPES
from stagespec.v1.observation_pb2 import Candidates, ElementType, Observation

MAX_CHUNK_BYTES = 1024 * 1024


def observe_hidden_states(
    hidden_states: Tensor, first_position: int, element_type: ElementType.ValueType
) -> list[Observation]:
    """Hidden states of consecutive positions, in messages of bounded size.

    Args:
        hidden_states: [num_positions, hidden]
        first_position: Position of the first row.
        element_type: Number format to send.
    """
    rows = hidden_states.to(DTYPES[element_type]).cpu().contiguous()
    per_chunk = max(1, MAX_CHUNK_BYTES // (rows.shape[1] * rows.element_size()))
    return [
        Observation(
            first_position=first_position + begin,
            num_positions=len(chunk),
            element_type=element_type,
            # numpy has no bfloat16, so the bytes are taken without looking at them.
            hidden_states=chunk.view(torch.uint8).numpy().tobytes(),
        )
        for begin in range(0, len(rows), per_chunk)
        for chunk in [rows[begin : begin + per_chunk]]
    ]


def observe_candidates(token_ids: Sequence[int], logits: Tensor, count: int) -> list[Candidates]:
    """The likeliest successors of some tokens.

    Args:
        token_ids: The tokens. [n]
        logits: Raw logits after each. [n, vocab]
        count: How many successors of each.
    """
    top = logits.topk(min(count, logits.shape[1])).indices.tolist()
    return [
        Candidates(token_id=token_id, candidate_ids=ids) for token_id, ids in zip(token_ids, top, strict=True)
    ]
