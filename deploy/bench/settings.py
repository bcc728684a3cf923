"""What a run of the benchmark measures. It knows names and limits, and nothing about how it is done."""

from dataclasses import asdict, dataclass
from typing import Any

from deploy.client import CHAIN_LENGTH, MODES
from stagespec.v1.generation_pb2 import SamplingOptions

TIMED_PARTS = ("generate", "prefill", "sessions", "verify", "quality")
PARTS = (*TIMED_PARTS, "speculation")
"""The others count, and do not depend on how fast the machine is."""
SUITES = ("humaneval",)
PEERS = ("hf", "llamacpp-f32", "llamacpp-f16", "llamacpp-q4")
SAMPLINGS = {
    "greedy": SamplingOptions(temperature=0.0),
    "topk50": SamplingOptions(temperature=1.0, top_k=50, seed=7),
}
PEER_SAMPLINGS = ("greedy",)
"""Samplings in which peers draw the same tokens, so that speeds can be compared."""

PLAIN = "off"
"""The mode that is plain decoding."""

OWN_SIZES = (PLAIN, "chain")
"""Modes whose drafts have a size of their own."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How the models of a server are told to compute.

    Attributes:
        weight_format: Format of the weights; None for the configuration's.
        kernel: Implementation of the forward pass; None for the configuration's.
    """

    weight_format: str | None = None
    kernel: str | None = None

    @property
    def label(self) -> str:
        """What it is called in records and tables."""
        return "+".join(part for part in (self.weight_format, self.kernel) if part) or "configured"

    @property
    def changes(self) -> dict[str, str]:
        """The model settings that it changes."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        parts: Some of `PARTS`.
        modes: Own ways to decode, some of `deploy.client.MODES`.
        samplings: Some of `SAMPLINGS`.
        peers: Some of `PEERS`.
        variants: At least one; every mode is measured with each.
        max_tokens: Most tokens of a generation.
        num_pairs: Least number of pairs behind a ratio.
        contexts: Context lengths at which a verify pass is timed.
        row_counts: Rows of the verify passes that are timed.
        prompt_lengths: Lengths of the prompts whose prefill is timed.
        session_counts: How many requests run at once where throughput is measured.
        chain_length: Tokens in a draft of mode "chain".
        max_nodes: Most nodes in a draft of the other modes; None for the server's setting.
        budgets: What else that limit is set to where drafts are counted.
    """

    parts: tuple[str, ...] = TIMED_PARTS
    modes: tuple[str, ...] = (PLAIN,)
    samplings: tuple[str, ...] = ("greedy",)
    peers: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    max_tokens: int = 64
    num_pairs: int = 5
    contexts: tuple[int, ...] = (256, 1024, 4096)
    row_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompt_lengths: tuple[int, ...] = (512, 2048)
    session_counts: tuple[int, ...] = (1, 2, 4, 8)
    chain_length: int = CHAIN_LENGTH
    max_nodes: int | None = None
    budgets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = {"parts": PARTS, "modes": MODES, "samplings": tuple(SAMPLINGS), "peers": PEERS}
        for name, names in known.items():
            for value in getattr(self, name):
                if value not in names:
                    raise ValueError(f"{name[:-1]} {value!r} is unknown; there are {', '.join(names)}")
        for name in ("parts", "modes", "samplings", "variants"):
            if not getattr(self, name):
                raise ValueError(f"there are no {name}: name at least one")
        numbers = ("contexts", "row_counts", "prompt_lengths", "session_counts")
        for name in (*known, "variants", *numbers, "budgets"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} name something twice: {', '.join(map(str, values))}")
        for name in numbers:
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be whole numbers from 1")
        if any(budget < 1 for budget in self.budgets):
            raise ValueError("budgets must be whole numbers from 1")
        for name in ("max_tokens", "num_pairs", "chain_length", "max_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value} and must be at least 1")

    def plain(self) -> dict[str, Any]:
        """The settings as plain data."""
        return asdict(self)
