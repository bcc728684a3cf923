"""What decoding made a stage's model do: its passes, and what these read and computed."""

from dataclasses import dataclass

from stagespec.v1.generation_pb2 import StageWork

FIRST_STEP = 1
"""The step that reads the prompt. It is no decoding, and what it costs depends on the prompt."""


@dataclass(slots=True)
class Work:
    """Work of one stage within one request, the first step's left out.

    Attributes:
        num_passes: Forward passes of its model.
        num_cache_rows: Rows of the cache that they read: for each pass the tokens of the context.
        num_rows: Rows that they computed.
    """

    num_passes: int = 0
    num_cache_rows: int = 0
    num_rows: int = 0

    def add(self, step_id: int, context_length: int, num_passes: int, num_rows: int) -> None:
        """Adds what was done in a step, or for one round of it."""
        if step_id > FIRST_STEP:
            self.num_passes += num_passes
            self.num_cache_rows += num_passes * context_length
            self.num_rows += num_rows

    def to_proto(self, name: str) -> StageWork:
        """The message that shows it."""
        return StageWork(
            name=name,
            num_passes=self.num_passes,
            num_cache_rows=self.num_cache_rows,
            num_rows=self.num_rows,
        )
