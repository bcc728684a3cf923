"""The model of a draft stage: any causal language model, or a trained draft of one of two kinds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.causal_lm.load import LoadedModel, load
from services.draft.artifact import is_artifact
from services.draft.settings import DraftSettings

Inputs = Callable[[Sequence[int], Tensor, Tensor], Tensor]
"""From tokens [n], the target's hidden states one position earlier [n, target_hidden], and where these are
known [n], to what the first layer reads [n, hidden]."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts.

    Attributes:
        loaded: The model; the tokens of its logits are those of `token_ids`.
        token_ids: The target's ids of the tokens that it can propose, rising; None for the whole vocabulary.
            [num_kept]
        inputs: Makes what the first layer reads; None where that is the model's own embedding.
        target_hidden_size: Width of the hidden states that it is conditioned on; 0 if it is not.
    """

    loaded: LoadedModel
    token_ids: npt.NDArray[np.int64] | None = None
    inputs: Inputs | None = None
    target_hidden_size: int = 0


def load_draft(settings: DraftSettings) -> DraftModel:
    """Loads what a draft stage is told to serve.

    Raises:
        UnservableModelError: It cannot be served; the text says why.
    """
    if is_artifact(Path(settings.model)):
        from services.draft.trained import load_trained

        return load_trained(settings)
    return DraftModel(load(settings))
