"""What the target stage can be told."""

from dataclasses import dataclass

from services.causal_lm.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class TargetSettings(ModelSettings):
    """How the target is loaded and served.

    Attributes:
        max_batch_rows: Most rows in one pass, all sessions together. Where drafts do not fit, their least
            probable nodes do not run.
    """

    max_batch_rows: int = 1024

    def __post_init__(self) -> None:
        # The zero-argument form does not work in a dataclass with slots.
        super(TargetSettings, self).__post_init__()
        if self.max_batch_rows < 2:  # one for who decodes, one for who reads a prompt
            raise ValueError(f"max_batch_rows is {self.max_batch_rows} and must be at least 2")
