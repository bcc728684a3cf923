"""Weight formats: what is stored for a linear layer, and what that does to its numbers.

Rounding is to the nearest. An 8-bit layer stores a scale for each group of weights, and rounds its input to
16 bits, with a scale for each row and group, so that products are summed in integers and a row's result does
not depend on other rows.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

ModuleT = TypeVar("ModuleT", bound=nn.Module)

GROUP = 32
"""Input features that share a scale in the 8-bit format."""


def bytes_per_weight(weight_format: str) -> float:
    """Bytes that one weight takes, its share of the scales included."""
    return {"float32": 4.0, "int8": 1.0 + 4.0 / GROUP}.get(weight_format, 2.0)


def quantize(values: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Rounds to integers from `-largest` to `largest`, with one scale for each group of `GROUP` values.

    Args:
        values: [n, width] in float32.
        largest: 127 for 8 bits, 32767 for 16.

    Returns:
        The integers as float32, [n, groups, GROUP] with zeros behind the width, and the scales, [n, groups].
        A group of zeros has scale 0.
    """
    padded = functional.pad(values, (0, -values.shape[1] % GROUP))
    groups = padded.reshape(len(values), padded.shape[1] // GROUP, GROUP)
    sizes = groups.abs().amax(-1)
    inverse = torch.where(sizes > 0, largest / sizes, 0.0)
    return torch.round(groups * inverse.unsqueeze(-1)), sizes / largest


def rounded(values: Tensor, largest: int) -> Tensor:
    """What is left of some values after `quantize`. [n, width]."""
    integers, scales = quantize(values, largest)
    return (integers * scales.unsqueeze(-1)).flatten(1)[:, : values.shape[1]]


class Linear8(nn.Module):
    """An 8-bit linear layer by its definition: the slow oracle of the fast ones."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Rounds a layer's weight.

        Args:
            weight: [num_outputs, num_inputs]
            bias: [num_outputs] or None.
        """
        super().__init__()
        self._weight = rounded(weight.float(), 127)
        self._bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies rows. [..., num_inputs] -> [..., num_outputs]."""
        flat = rounded(rows.reshape(-1, rows.shape[-1]), 32767)
        result = functional.linear(flat, self._weight, self._bias)
        return result.reshape(*rows.shape[:-1], result.shape[-1])


def as_served(model: ModuleT, weight_format: str) -> ModuleT:
    """Makes an ordinary float32 model compute with the numbers that are served.

    Args:
        model: Changed in place.
        weight_format: One of `settings.WEIGHT_FORMATS`, or the model's own number format.

    Returns:
        The same model: its matrices rounded to float16 and back; in the 8-bit format the embedding alone, and
        every linear layer a `Linear8`.
    """
    if weight_format == "int8":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if is_linear(child):
                    setattr(parent, name, Linear8(*weight_and_bias(child)))
    if weight_format in ("float16", "int8"):
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.dtype == torch.float32:
                parameter.data = parameter.data.half().float()
    return model


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; GPT-2's Conv1D is one, with a transposed weight."""
    # A subclass may compute something else.
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer. [num_outputs, num_inputs], [num_outputs]."""
    weight: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    weight = weight.t() if type(module).__name__ == "Conv1D" else weight
    return weight.detach(), None if bias is None else bias.detach()
