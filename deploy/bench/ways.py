"""A way to decode: an own mode or a peer, and what both can be asked. It does not know how they do it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deploy.bench.roofline import Work


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode.

    Attributes:
        mode: Own mode, or the name of a peer.
        variant: Label of the own server's variant; empty for a peer.
    """

    mode: str
    variant: str = ""

    @property
    def is_peer(self) -> bool:
        """Whether it is another program."""
        return not self.variant

    @property
    def name(self) -> str:
        """What it is called in records and tables."""
        return self.mode if self.is_peer else f"{self.mode} {self.variant}"


def name_of(result: Mapping[str, Any]) -> str:
    """The name of the way that a result is about."""
    return Way(result["mode"], result["variant"]).name


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a way once its model is loaded.

    Attributes:
        weight_format: Number format of the weights as served.
        kernel: What computes, as an own mode says; empty for a peer.
        num_threads: Threads it computes with.
        work: What a pass has to do; None for modes whose passes are not all alike.
        software: Name and version of a peer's program; empty for own modes.
    """

    weight_format: str
    kernel: str
    num_threads: int
    work: Work | None
    software: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation.

    Attributes:
        token_ids: What was generated, a token that ends it included.
        seconds: From the request to the end.
        first_token_s: From the request to the first tokens.
        num_first: How many tokens came first.
        counts: Steps, drafted and accepted nodes and draft passes of an own mode; empty for a peer.
    """

    token_ids: tuple[int, ...]
    seconds: float
    first_token_s: float
    num_first: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of decoding: tokens after the first ones by the time they took; None if there are none."""
        num_tokens, seconds = len(self.token_ids) - self.num_first, self.seconds - self.first_token_s
        return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None

    def plain(self) -> dict[str, Any]:
        """The sample as it is recorded."""
        return {
            "num_tokens": len(self.token_ids),
            "seconds": self.seconds,
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
            "end_to_end_tokens_per_s": len(self.token_ids) / self.seconds,
            **self.counts,
            "token_ids": list(self.token_ids),
        }


class Runner(Protocol):
    """Something that decodes in one way, its model loaded."""

    @property
    def way(self) -> Way:
        """Which way."""

    @property
    def description(self) -> Description:
        """What is known of it."""

    async def generate(self, prompt: Sequence[int], sampling: str, max_tokens: int) -> Sample:
        """Continues a prompt until `max_tokens` or an end-of-sequence token."""

    async def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token, nothing of it being cached."""

    def processes(self) -> Mapping[str, int]:
        """Ids of the processes that compute, by name; none if they are not on this machine."""
