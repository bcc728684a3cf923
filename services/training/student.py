"""A draft in training: the decoder, what it borrows, and its scores for the tokens that it knows."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.draft.artifact import FEATURE
from services.draft.decoder import DraftDecoder
from services.training.batches import Batch


@dataclass(frozen=True, slots=True)
class Student:
    """A draft and its tables.

    Attributes:
        decoder: Its layers.
        token_ids: Tokens that its head knows, rising. [num_kept]
        index: For every token id its place among those, or their number if it is not there. [vocab]
        embedding: The target's; empty if it is not borrowed. [vocab, hidden]
        head: The target's rows of the kept tokens; empty if not borrowed. [num_kept, hidden]
    """

    decoder: DraftDecoder
    token_ids: Tensor
    index: Tensor
    embedding: Tensor
    head: Tensor

    @property
    def reads_features(self) -> bool:
        """Whether it is conditioned on the target's hidden states."""
        return self.decoder.shape.kind == FEATURE

    def logits(self, batch: Batch) -> Tensor:
        """Scores of the kept tokens after each taught row. [num_taught, num_kept]."""
        decoder = self.decoder
        if self.reads_features:
            embedded = functional.embedding(batch.token_ids, self.embedding)
            inputs = decoder.inputs(embedded, batch.features, batch.known)
            head = self.head
        else:
            inputs = decoder.embedded(self.index[batch.token_ids])
            head = decoder["embedding"][: decoder.num_kept]
        hidden = decoder(inputs, batch.positions, batch.visible)
        return functional.linear(hidden[batch.taught], head).float()

    def loss(self, batch: Batch, depth_weight: float) -> Tensor:
        """Cross entropy with the target's probabilities, as far as the head knows the tokens.

        Args:
            batch: Of which all taught rows count.
            depth_weight: What a drafted row counts against one that lies one level higher: fewer are reached.
        """
        scores = self.logits(batch).log_softmax(dim=-1)
        places = self.index[batch.top_ids]
        inside = places < self.decoder.num_kept
        given = scores.gather(1, places.clamp_max(self.decoder.num_kept - 1))
        each = -(torch.where(inside, batch.top_probs, 0.0) * given).sum(dim=1)
        weights = depth_weight ** batch.depths.float()
        return (each * weights).sum() / weights.sum()


def most_frequent(counts: Tensor, num_kept: int) -> Tensor:
    """Ids of the most frequent tokens, rising; at a tie the lower id.

    Args:
        counts: By id. [vocab]
        num_kept: How many, if there are so many that occur.
    """
    ranked = torch.sort(counts, descending=True, stable=True).indices[:num_kept]
    return ranked[counts[ranked] > 0].sort().values
