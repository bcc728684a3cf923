"""What every stage that runs a causal language model can be told."""

import re
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
MAX_THREADS = 1024
MIN_CONTEXT_LENGTH = 16
"""The load check needs this much."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is loaded and served.

    Attributes:
        model: Folder of a Hugging Face causal language model, or its id on the hub.
        device: Torch device, such as "cpu" or "cuda:0".
        dtype: Number format of weights and activations.
        num_threads: Threads to compute with on the CPU; None for as many as the process may use.
        max_sessions: Most sessions at once.
        max_context_length: Longest context, drafted nodes included; None for the model's own limit.
        max_nodes: Most drafted nodes of one session in a pass.
        prefill_chunk: Most context tokens of one session in a pass; longer prefills take several.
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int | None = None
    max_sessions: int = 16
    max_context_length: int | None = None
    max_nodes: int = 256
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model is empty: name a folder or a hub id")
        if not DEVICE.fullmatch(self.device):
            raise ValueError(
                f"device is {self.device!r} and must be cpu, cuda, mps or xpu, perhaps with :NUMBER"
            )
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ValueError(f"num_threads is {self.num_threads} and must be at most {MAX_THREADS}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r} and must be one of {', '.join(DTYPES)}")
        least = {
            "num_threads": 1,
            "max_sessions": 1,
            "max_context_length": MIN_CONTEXT_LENGTH,
            "max_nodes": 1,
            "prefill_chunk": 1,
        }
        for name, limit in least.items():
            value: int | None = getattr(self, name)
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value} and must be at least {limit}")
