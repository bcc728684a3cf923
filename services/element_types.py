"""Number formats of tensors on the wire, as torch knows them."""

import torch

from stagespec.v1.observation_pb2 import (
    ELEMENT_TYPE_BFLOAT16,
    ELEMENT_TYPE_FLOAT16,
    ELEMENT_TYPE_FLOAT32,
)

DTYPES = {
    ELEMENT_TYPE_FLOAT32: torch.float32,
    ELEMENT_TYPE_FLOAT16: torch.float16,
    ELEMENT_TYPE_BFLOAT16: torch.bfloat16,
}
