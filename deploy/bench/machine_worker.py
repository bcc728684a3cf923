"""Measures the machine's limits with torch: how fast it reads memory and how fast it multiplies.

Each limit is the best of several stock kernels: none can be faster than the machine.
"""

import time
from collections.abc import Callable

import torch

from deploy.bench.worker import Actions

_READ_BYTES = 512 << 20
_SIZES = (1024, 2048)
_REPEATS = 5


def start(num_threads: int) -> Actions:
    """The one action, `measure`."""
    torch.set_num_threads(num_threads)
    return {"measure": measure}


@torch.inference_mode()
def measure() -> dict[str, float]:
    """The fields of `roofline.Machine`."""
    # Larger than any cache, so that each kernel below reads it from memory once.
    values = torch.ones(_READ_BYTES // 4)
    reads: list[Callable[[], object]] = [values.sum, lambda: torch.dot(values, values), values.amax]
    read_bytes_per_s = _READ_BYTES / min(_shortest(kernel) for kernel in reads)
    flops = max(2 * size**3 / _shortest_product(size) for size in _SIZES)
    return {"read_bytes_per_s": read_bytes_per_s, "flops": flops}


def _shortest_product(size: int) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    packed = torch.ops.mkldnn._reorder_linear_weight(b, None)

    def prepacked() -> object:
        return torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")

    return min(_shortest(lambda: a @ b), _shortest(prepacked))


def _shortest(kernel: Callable[[], object]) -> float:
    spent = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        kernel()
        spent.append(time.perf_counter() - begin)
    return min(spent)
