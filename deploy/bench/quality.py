"""How far a target as served is from the same model in float32, on a given text."""

from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file

from services.causal_lm.forward import Segment
from services.causal_lm.load import LoadedModel

MAX_TOKENS = 512
"""Of a text; the rest of a longer one is left out."""


class Quality:
    """Compares a served model with transformers in float32.

    Args:
        loaded: The model as served.
        model: Its folder or hub id.
    """

    def __init__(self, loaded: LoadedModel, model: str) -> None:
        self._loaded = loaded
        self._model = model

    def measure(self, text: str) -> dict[str, Any]:
        """Compares next-token probabilities at every position of a text.

        Returns:
            Sums over the text's positions: `num_tokens`, `loss` and `loss_float32` (negative log-likelihood
            in nats), `divergence` (Kullback-Leibler, from float32) and `num_agreed` (same likeliest token).
        """
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids[:MAX_TOKENS]
        if len(token_ids) < 2:
            return {"num_tokens": 0, "loss": 0.0, "loss_float32": 0.0, "divergence": 0.0, "num_agreed": 0}
        with torch.inference_mode():
            served = self._served(token_ids)
            exact = self._reference(input_ids=torch.tensor([token_ids])).logits[0, :-1]
            targets = torch.tensor(token_ids[1:]).unsqueeze(1)
            log_served, log_exact = served.log_softmax(-1), exact.log_softmax(-1)
            return {
                "num_tokens": len(targets),
                "loss": -log_served.gather(1, targets).sum().item(),
                "loss_float32": -log_exact.gather(1, targets).sum().item(),
                "divergence": (log_exact.exp() * (log_exact - log_served)).sum().item(),
                "num_agreed": int((served.argmax(-1) == exact.argmax(-1)).sum()),
            }

    def _served(self, token_ids: list[int]) -> Tensor:
        """Logits after each token but the last. [n - 1, vocab]."""
        rows = self._loaded.new_rows()
        for token_id in token_ids:
            rows.add(len(rows) - 1, token_id)
        rows.grow_path(len(rows))
        [output] = self._loaded.forward([Segment(rows, len(rows), range(len(rows) - 1))])
        return output.logits.cpu()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(cached_file(self._model, "tokenizer.json"))

    @cached_property
    def _reference(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32).eval()
