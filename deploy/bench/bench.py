"""What every part of a run works with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.bench.plan import Unit
from deploy.bench.records import Records
from deploy.bench.settings import Settings
from deploy.config import Config
from deploy.prompts import Prompt


@dataclass(slots=True)
class Bench:
    """A run.

    Attributes:
        settings: What to measure.
        prompts: What to generate from.
        config: The deployment to run.
        address: A running server to use instead; None to run one.
        gguf: File for llama.cpp; None for the bundled target's.
        records: Where results go.
        note: Told how it goes, a line at a time.
        concurrency: Most requests at once where nothing is timed.
        skipped: What is left out, and why.
    """

    settings: Settings
    prompts: Sequence[Prompt]
    config: Config
    address: str | None
    gguf: Path | None
    records: Records
    note: Callable[[str], None]
    concurrency: int = 8
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def timeout(self) -> float:
        """Seconds for a child process to load."""
        return self.config.supervision.start_timeout_s

    def skip(self, what: str, reason: str) -> None:
        """Leaves out a subject or a case, and says so once."""
        if what not in self.skipped:
            self.skipped[what] = reason
            self.records.add(("skipped", what), {"reason": reason})
            self.note(f"left out: {what}: {reason}")

    def skips(self, unit: Unit) -> bool:
        """Whether a unit is left out."""
        return unit.subject in self.skipped or unit.case in self.skipped
