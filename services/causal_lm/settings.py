"""What every stage that runs a causal language model can be told."""

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")


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
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r} and must be one of {', '.join(DTYPES)}")
        limits = {
            "num_threads": self.num_threads,
            "max_sessions": self.max_sessions,
            "max_context_length": self.max_context_length,
            "max_nodes": self.max_nodes,
            "prefill_chunk": self.prefill_chunk,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value} and must be at least 1")
