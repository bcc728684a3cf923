"""Linear layers from torch's own kernels, by weight format, whose rows do not depend on the batch.

On a CPU most kernels sum in another order for some batch sizes. Which sizes agree is a property of kernel and
processor, so it is found out when a layer is made, and other batches are padded to the next size that agrees.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.causal_lm.formats import is_linear, rounded, weight_and_bias
from services.causal_lm.weights import Linear

Multiply = Callable[[Tensor], Tensor]
"""[n, num_inputs] -> [n, num_outputs]"""

MAX_BATCH = 64
"""Larger batches run in parts; at this size weights are read from memory once for many rows already."""

PROBED_OUTPUTS = 256
"""Outputs that are enough to find out how a kernel sums."""


def make_linear(linear: Linear, weight_format: str) -> Multiply:
    """Packs a layer for torch's best kernel.

    Args:
        linear: The layer, in float32 on the CPU, or on another device in the dtype to compute in.
        weight_format: One of `settings.WEIGHT_FORMATS`. On another device the weight is what it is.
    """
    weight, bias = linear.weight.detach(), linear.bias
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda rows: functional.linear(rows, weight, bias)
    if weight_format == "int8":
        multiply = _stable(_single, rounded(weight, 127), bias)
        return lambda rows: multiply(rounded(rows, 32767))
    return _stable(_half if weight_format == "float16" else _single, weight, bias)


class ServedLinear(nn.Module):
    """A linear layer of a transformers model, in the weight format that is served."""

    def __init__(self, linear: Linear, weight_format: str) -> None:
        super().__init__()
        self._multiply = make_linear(linear, weight_format)
        self._num_outputs = linear.weight.shape[0]

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies rows. [..., num_inputs] -> [..., num_outputs]."""
        flat = self._multiply(rows.reshape(-1, rows.shape[-1]))
        return flat.reshape(*rows.shape[:-1], self._num_outputs)


def serve_linears(model: nn.Module, weight_format: str) -> None:
    """Replaces every linear layer of a float32 model on the CPU, GPT-2's `Conv1D` included.

    Args:
        model: Changed in place. Tied embeddings keep their own table, since a packed weight cannot be looked
            up in.
        weight_format: See `make_linear`.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_linear(child):
                weight, bias = weight_and_bias(child)
                if weight.device.type == "cpu" and weight.dtype == torch.float32:
                    setattr(parent, name, ServedLinear(Linear(weight, bias), weight_format))


class Stable:
    """A kernel that is only called with batch sizes whose rows agree."""

    def __init__(self, multiply: Multiply, sizes: tuple[int, ...]) -> None:
        """Wraps a kernel.

        Args:
            multiply: The kernel.
            sizes: From `agreeing_sizes`.
        """
        self._multiply = multiply
        self._sizes = sizes

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiplies rows. [n, num_inputs] -> [n, num_outputs]."""
        if len(rows) > MAX_BATCH:
            return torch.cat([self(part) for part in torch.split(rows, MAX_BATCH)])
        size = next(size for size in self._sizes if size >= len(rows))
        if size == len(rows):
            return self._multiply(rows)
        return self._multiply(functional.pad(rows, (0, 0, 0, size - len(rows))))[: len(rows)]


def agreeing_sizes(multiply: Multiply, num_inputs: int) -> tuple[int, ...]:
    """Batch sizes up to `MAX_BATCH` at which a kernel gives the same rows, bit by bit, as at `MAX_BATCH`."""
    rows = torch.randn(MAX_BATCH, num_inputs, generator=torch.Generator().manual_seed(0))
    expected = multiply(rows)
    return tuple(
        size for size in range(1, MAX_BATCH + 1) if torch.equal(multiply(rows[:size]), expected[:size])
    )


def _stable(
    make: Callable[[Tensor, Tensor | None], Multiply], weight: Tensor, bias: Tensor | None
) -> Multiply:
    probe = make(weight[:PROBED_OUTPUTS], None)
    return Stable(make(weight, bias), agreeing_sizes(probe, weight.shape[1]))


def _single(weight: Tensor, bias: Tensor | None) -> Multiply:
    """A packed float32 weight, in oneDNN."""
    if not torch._C._has_mkldnn:
        return lambda rows: functional.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def multiply(rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), packed, bias, "none", [], "")
        return result

    return multiply


def _half(weight: Tensor, bias: Tensor | None) -> Multiply:
    """FBGEMM with a float16 weight and float32 sums."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return _single(weight.half().float(), bias)
    packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)

    def multiply(rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows.contiguous(), packed)
        return result

    return multiply
