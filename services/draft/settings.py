"""What the draft stage can be told."""

from dataclasses import dataclass

from services.causal_lm.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class DraftSettings(ModelSettings):
    """How a draft model is loaded and how it grows trees.

    Attributes:
        num_candidates: Most children of a node that are considered.
        target: Where `model` is a trained draft that borrows from its target: that target's folder or id.
    """

    num_candidates: int = 8
    target: str | None = None

    def __post_init__(self) -> None:
        # The zero-argument form does not work in a dataclass with slots.
        super(DraftSettings, self).__post_init__()
        if self.num_candidates < 1:
            raise ValueError(f"num_candidates is {self.num_candidates} and must be at least 1")
        if self.target == "":
            raise ValueError("target is empty: name a folder or a hub id, or leave it out")
