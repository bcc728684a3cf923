"""The last layer: logits, in float32 whatever the model computes in."""

import torch
from torch import Tensor

from services.causal_lm.linears import Multiply, make_linear
from services.causal_lm.weights import Linear


def make_head(linear: Linear, weight_format: str) -> Multiply:
    """Packs a head.

    On CUDA a matrix in half precision is multiplied into float32: rounded to bfloat16, logits of 16 and more
    are an eighth apart, and the best two would often be equal. Other devices have no such kernel; there the
    product is rounded before it is converted.

    Args:
        linear: The layer. [vocab, hidden]
        weight_format: See `make_linear`.
    """
    weight, bias = linear.weight.detach(), linear.bias
    if weight.device.type != "cuda" or weight.dtype == torch.float32:
        multiply = make_linear(linear, weight_format)
        return lambda rows: multiply(rows).float()

    def widened(rows: Tensor) -> Tensor:
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits + bias

    return widened
