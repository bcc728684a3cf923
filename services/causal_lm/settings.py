"""What every stage that runs a causal language model can be told."""

import re
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_FORMATS = ("float32", "float16", "int8")
KERNELS = ("auto", "native", "torch", "generic")
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
        dtype: Number format of activations, and of weights unless `weight_format` says otherwise.
        weight_format: How weights are stored, on the CPU in float32: "float32", "float16", or "int8", see
            `formats`. None: as `dtype` says.
        kernel: What computes. "native" is the C kernel, "torch" a lean pass of torch's operations, both for
            Llama and GPT-2 models; "generic" is transformers' own code. "auto": the first of these that can.
        num_threads: Threads to compute with on the CPU; None for as many as the process may use.
        max_sessions: Most sessions at once.
        max_context_length: Longest context, drafted nodes included; None for the model's own limit.
        max_nodes: Most drafted nodes of one session in a pass.
        prefill_chunk: Most tokens of prompts in a pass; longer prompts take several.
        shared_prefill_chunk: Likewise in a pass that other sessions wait for, which decode.
        max_cache_bytes: Most bytes that keys and values of all sessions take; None for a quarter of what is
            available once the model is loaded, or for what `max_sessions` can use if that is less. While one
            session's grow, half of them are there twice.
        prefix_pool_bytes: Of these, most for contexts of finished sessions, so that the next turn of a chat
            reads only what is new; 0 keeps none. They give way to live sessions.
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    weight_format: str | None = None
    kernel: str = "auto"
    num_threads: int | None = None
    max_sessions: int = 16
    max_context_length: int | None = None
    max_nodes: int = 256
    prefill_chunk: int = 512
    shared_prefill_chunk: int = 64
    max_cache_bytes: int | None = None
    prefix_pool_bytes: int = 0

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
        if self.weight_format is not None and self.weight_format not in WEIGHT_FORMATS:
            raise ValueError(
                f"weight_format is {self.weight_format!r} and must be one of {', '.join(WEIGHT_FORMATS)}"
            )
        if self.weight_format is not None and (self.dtype, self.device) != ("float32", "cpu"):
            raise ValueError(
                f"weight_format is {self.weight_format!r} and needs dtype float32 and device cpu, "
                f"not {self.dtype} and {self.device}"
            )
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel is {self.kernel!r} and must be one of {', '.join(KERNELS)}")
        least = {
            "num_threads": 1,
            "max_sessions": 1,
            "max_context_length": MIN_CONTEXT_LENGTH,
            "max_nodes": 1,
            "prefill_chunk": 1,
            "shared_prefill_chunk": 1,
            "max_cache_bytes": 1,
            "prefix_pool_bytes": 0,
        }
        for name, limit in least.items():
            value: int | None = getattr(self, name)
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value} and must be at least {limit}")
        if self.max_cache_bytes is not None and self.prefix_pool_bytes > self.max_cache_bytes:
            text = f"at most max_cache_bytes, which is {self.max_cache_bytes}"
            raise ValueError(f"prefix_pool_bytes is {self.prefix_pool_bytes} and must be {text}")
