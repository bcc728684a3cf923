"""How results are shown: notes on standard error, messages as plain data, tables and colours."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from stagespec.rpc import seconds
from stagespec.v1.pipeline_pb2 import GetPipelineResponse, Stage, StageState


def note(line: str) -> None:
    """Tells a person how things go; results go to standard output."""
    print(line, file=sys.stderr, flush=True)


def plain(message: Message) -> Any:
    """A message as JSON knows it: every field by its proto name, durations in seconds, unset ones as None."""
    if isinstance(message, Duration):
        return seconds(message)
    if isinstance(message, Timestamp):
        return message.ToJsonString()
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_value(field, entry) for entry in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table whose first column is left-aligned and the others right-aligned."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        first = row[0].ljust(widths[0])
        yield "  ".join([first, *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()


def pipeline_lines(pipeline: GetPipelineResponse) -> Iterator[str]:
    """The pipeline for a person, a line a stage, with the reason of any that is not used."""
    for stage in (*pipeline.drafters, pipeline.verifier):
        role = "target " if stage is pipeline.verifier else "drafter"
        yield f"{role} {stage.name}: {_state(stage)}, {_what(stage)}, at {stage.address}"


def _state(stage: Stage) -> str:
    state = StageState.Name(stage.state).removeprefix("STAGE_STATE_").lower()
    return f"{state} ({stage.idle_reason})" if stage.idle_reason else state


def _what(stage: Stage) -> str:
    info = stage.info
    parts = [info.implementation, info.model, info.device, info.weight_format]
    if info.num_parameters:
        parts.append(f"{info.num_parameters / 1e6:.0f}M parameters")
    return " ".join(part for part in parts if part)


class Palette:
    """Colours by who proposed a token.

    Args:
        drafters: Names of the drafters, in order.
        enabled: Whether to colour at all.
    """

    def __init__(self, drafters: Sequence[str], *, enabled: bool) -> None:
        codes = ("33", "32", "36", "35", "34")
        self._codes = {name: codes[index % len(codes)] for index, name in enumerate(drafters)}
        self._enabled = enabled

    def paint(self, text: str, origin: str) -> str:
        """The text in its origin's colour; the target's own has none."""
        code = self._codes.get(origin)
        if not self._enabled or code is None or not text:
            return text
        return f"\x1b[{code}m{text}\x1b[0m"

    def legend(self) -> str:
        """Which colour stands for whom; empty without colours."""
        if not self._enabled:
            return ""
        return "proposed by: " + ", ".join([*(self.paint(name, name) for name in self._codes), "target"])
