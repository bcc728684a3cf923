"""Batches of sequences as rows to train a draft on. It knows which row sees which, and no model.

A draft that is conditioned on the target meets two kinds of rows when it is served: rows of the context,
whose hidden states are known, and rows of drafted nodes below some place in the context, whose hidden states
are not. Both are trained on at once: each sequence is there as context rows, which see each other as in any
causal model, and its generated part once more as drafted rows in blocks. A drafted row sees the context rows
before its block and the drafted rows of its block up to itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from services.training.collection import Sequences


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of a collection, without its last token, which has no row.

    Attributes:
        token_ids: [n]
        prompt_length: How many are the prompt's, at least 1.
        hidden_states: The target's, of each token. [n, hidden] in float16
        next_ids: The drawn token, after each of the last rows. [num_drawn]
        top_ids: The target's likeliest next tokens there. [num_drawn, kept]
        top_probs: Their probabilities. [num_drawn, kept]
    """

    token_ids: Tensor
    prompt_length: int
    hidden_states: Tensor
    next_ids: Tensor
    top_ids: Tensor
    top_probs: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several sequences, filled up to the longest.

    Attributes:
        token_ids: [batch, n]
        positions: [batch, n]
        features: The target's hidden state one position earlier. [batch, n, hidden]
        known: Which rows may use it. [batch, n]
        visible: Which rows each row attends to. [batch, n, n]
        taught: Sequence and row of each row that is to predict a token. [num_taught] each
        depths: How many drafted rows lie between those and the context, themselves among them. [num_taught]
        labels: Sequence and drawn token that they are to predict, by number. [num_taught] each
        next_ids: The drawn tokens. [num_taught]
        top_ids: What the target thought likeliest. [num_taught, kept]
        top_probs: Its probabilities. [num_taught, kept]
    """

    token_ids: Tensor
    positions: Tensor
    features: Tensor
    known: Tensor
    visible: Tensor
    taught: tuple[Tensor, Tensor]
    depths: Tensor
    labels: tuple[Tensor, Tensor]
    next_ids: Tensor
    top_ids: Tensor
    top_probs: Tensor

    def to(self, device: str) -> "Batch":
        """The same on another device."""

        def moved(value: Tensor | tuple[Tensor, Tensor]) -> Any:
            return value.to(device) if isinstance(value, Tensor) else tuple(each.to(device) for each in value)

        return Batch(**{each.name: moved(getattr(self, each.name)) for each in fields(self)})


def examples(parts: Iterable[Sequences]) -> Iterator[Example]:
    """The sequences of a collection that have something to teach."""
    for part in parts:
        begin = drawn = 0
        for length, prompt_length in zip(part.lengths.tolist(), part.prompt_lengths.tolist(), strict=True):
            end, last = begin + length, drawn + length - prompt_length
            if length > prompt_length:
                logits = part.top_logits[drawn:last].float()
                yield Example(
                    token_ids=part.token_ids[begin : end - 1].long(),
                    prompt_length=prompt_length,
                    hidden_states=part.hidden_states[begin : end - 1],
                    next_ids=part.token_ids[begin + prompt_length : end].long(),
                    top_ids=part.top_ids[drawn:last].long(),
                    top_probs=(logits - part.totals[drawn:last].unsqueeze(1)).exp(),
                )
            begin, drawn = end, last


def drafted_from(example: Example, block: int, offset: int) -> Tensor:
    """For each generated row the first row of its block.

    Args:
        example: The sequence.
        block: Rows of a block.
        offset: Rows by which the first block is shorter.
    """
    generated = torch.arange(example.prompt_length, len(example))
    begun = (generated - example.prompt_length + offset) // block * block
    return (begun - offset + example.prompt_length).clamp_min(example.prompt_length)


def make_batch(chosen: Sequence[Example], block: int, offsets: Sequence[int], *, two_kinds: bool) -> Batch:
    """Lays sequences out as rows.

    Args:
        chosen: The sequences.
        block: Most drafted rows in a row; of no meaning without them.
        offsets: For each sequence how much shorter its first block is, below `block`.
        two_kinds: Whether there are drafted rows. A draft that reads no hidden states has no use for them.
    """
    counts = [len(each) for each in chosen]
    seconds = [len(each) - each.prompt_length if two_kinds else 0 for each in chosen]
    n, size = max(a + b for a, b in zip(counts, seconds, strict=True)), len(chosen)
    token_ids, positions = torch.zeros(size, n, dtype=torch.long), torch.zeros(size, n, dtype=torch.long)
    features = torch.zeros(size, n, chosen[0].hidden_states.shape[1])
    known = torch.zeros(size, n, dtype=torch.bool)
    visible = torch.eye(n, dtype=torch.bool).repeat(size, 1, 1)  # what only fills up sees itself
    taught: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for index, (each, offset) in enumerate(zip(chosen, offsets, strict=True)):
        count, prompt = counts[index], each.prompt_length
        end = count + seconds[index]
        token_ids[index, :count], positions[index, :count] = each.token_ids, torch.arange(count)
        features[index, 1:count], known[index, 1:count] = each.hidden_states[:-1].float(), True
        visible[index, :count, :count] = torch.ones(count, count, dtype=torch.bool).tril()
        rows = torch.arange(prompt - 1, count)
        drawn = torch.arange(count - prompt + 1)
        taught.append((torch.full_like(rows, index), rows, torch.zeros_like(rows), drawn))
        if not seconds[index]:
            continue
        generated = torch.arange(prompt, count)
        first = drafted_from(each, block, offset)
        token_ids[index, count:end], positions[index, count:end] = each.token_ids[prompt:], generated
        visible[index, count:end, :count] = torch.arange(count) < first.unsqueeze(1)
        same = first.unsqueeze(1) == first
        visible[index, count:end, count:end] = same & (generated <= generated.unsqueeze(1))
        depths = generated - first + 1
        taught.append((torch.full_like(depths, index), torch.arange(count, end), depths, drawn[1:]))
    sequence, row, depth, label = (torch.cat(column) for column in zip(*taught, strict=True))
    # Drawn tokens of all sequences one after the other, and where each sequence's begin.
    lengths = torch.tensor([len(each.next_ids) for each in chosen])
    at = (lengths.cumsum(0) - lengths)[sequence] + label
    next_ids, top_ids, top_probs = (
        torch.cat([getattr(each, name) for each in chosen])[at]
        for name in ("next_ids", "top_ids", "top_probs")
    )
    return Batch(
        token_ids,
        positions,
        features,
        known,
        visible,
        (sequence, row),
        depth,
        (sequence, label),
        next_ids,
        top_ids,
        top_probs,
    )
