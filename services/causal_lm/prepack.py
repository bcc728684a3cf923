"""Linear layers whose rows do not depend on how many rows share the batch.

On a CPU, torch's default linear picks another summation order for every batch size, so that a token's logits
would change with the draft around it. oneDNN's prepacked linear computes each row alike at every size but 1,
so a single row is run as two. It is faster as well.
"""

from typing import Any

import torch
from torch import Tensor, nn


class PrepackedLinear(nn.Module):
    """A float32 linear layer on the CPU with bitwise batch-independent rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Packs a layer.

        Args:
            weight: [out_features, in_features]
            bias: [out_features], or None.
        """
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().clone()

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies rows. [..., in_features] -> [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        single = flat.shape[0] == 1
        if single:
            flat = flat.expand(2, -1).contiguous()
        result: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self._packed, self._bias, "none", [], "")
        return (result[:1] if single else result).reshape(*rows.shape[:-1], self.out_features)


def prepack(model: nn.Module) -> int:
    """Replaces every linear layer of a float32 CPU model, GPT-2's `Conv1D` included.

    Args:
        model: Changed in place. Tied embeddings keep their own table, since a packed weight cannot be looked
            up in.

    Returns:
        The number of layers replaced: 0 where oneDNN cannot serve the model's device or dtype.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight: Any = getattr(child, "weight", None)
            if not _is_linear(child) or weight.device.type != "cpu" or weight.dtype != torch.float32:
                continue
            transposed = weight.t() if type(child).__name__ == "Conv1D" else weight
            bias: Any = getattr(child, "bias", None)
            setattr(parent, name, PrepackedLinear(transposed, bias))
            replaced += 1
    return replaced


def _is_linear(module: nn.Module) -> bool:
    # Conv1D is GPT-2's linear layer with a transposed weight; a subclass may compute something else.
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"
