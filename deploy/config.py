"""The one configuration file: YAML in, frozen dataclasses out, every mistake by name.

The settings live in the packages they configure; they are only put together here.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from deploy.errors import ConfigError
from deploy.stages import DraftStage, NgramStage, Stage, TaggedStage, TargetStage, check_listen, missing_files
from orchestrator.settings import (
    AdmissionSettings,
    OrchestratorSettings,
    SpeculationSettings,
    TimeoutSettings,
)
from services.cache import cache_folder

DEFAULT = Path(__file__).with_name("config.yaml")
BUNDLED = Path(__file__).with_name("bundled")
"""Trained drafts that come with stagespec."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?")
_VARIABLE = re.compile(r"\$\{(\w*)\}")


@dataclass(frozen=True, slots=True)
class SupervisionSettings:
    """How stages are started, restarted and stopped.

    Attributes:
        start_timeout_s: For a stage to load and listen.
        placement_timeout_s: For Ray to find room for a stage.
        backoff_s: Before the first restart of a lost stage; doubled each time.
        max_backoff_s: Most to wait before a restart.
        max_restarts_per_minute: More of them wait for the minute to pass.
        drain_s: For running requests to end when everything stops.
    """

    start_timeout_s: float = 180.0
    placement_timeout_s: float = 60.0
    backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    max_restarts_per_minute: int = 6
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        limits = {
            "start_timeout_s": (self.start_timeout_s, 0.1, 86_400),
            "placement_timeout_s": (self.placement_timeout_s, 0.1, 86_400),
            "backoff_s": (self.backoff_s, 0.01, 600),
            "max_backoff_s": (self.max_backoff_s, self.backoff_s, 600),
            "max_restarts_per_minute": (self.max_restarts_per_minute, 1, 600),
            "drain_s": (self.drain_s, 0, 3_600),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ValueError(f"{name} is {value} and must be from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class Config:
    """A whole deployment.

    Attributes:
        stages: By name, drafters in the order in which they are asked, and one target.
        listen: Where the orchestrator serves.
        launcher: Who places, starts and restarts the stages.
        tokenizer: Folder with tokenizer and chat template; None for the target's own model.
        speculation: How far drafts may grow.
        admission: How many requests are taken.
        timeouts: How long the orchestrator waits for stages.
        supervision: How stages are started and restarted.
    """

    stages: dict[str, TaggedStage]
    listen: str = "127.0.0.1:50051"
    launcher: Literal["ray", "process"] = "ray"
    tokenizer: str | None = None
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    supervision: SupervisionSettings = field(default_factory=SupervisionSettings)

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    def __post_init__(self) -> None:
        check_listen(self.listen)
        for name in self.stages:
            if not _NAME.fullmatch(name):
                text = "must have 1 to 64 of a-z, 0-9, - and _, starting and ending with a letter or digit"
                raise ValueError(f"the stage name {name!r} {text}")
        targets = [name for name, stage in self.stages.items() if isinstance(stage, TargetStage)]
        if len(targets) != 1:
            raise ValueError(f"stages of kind target are {targets}; there must be exactly one")
        if "target" in self.drafters:
            raise ValueError("a drafter cannot be named 'target', which stands for the target's own tokens")
        taken = {self.listen: "the public API"}
        for name, stage in self.stages.items():
            if not stage.listen.endswith(":0") and stage.listen in taken:
                raise ValueError(
                    f"stages.{name}.listen is {stage.listen!r}, where {taken[stage.listen]} listens"
                )
            taken[stage.listen] = f"stage {name}"

    @property
    def target(self) -> tuple[str, TargetStage]:
        """The target's name and configuration."""
        return next((name, stage) for name, stage in self.stages.items() if isinstance(stage, TargetStage))

    @property
    def drafters(self) -> dict[str, NgramStage | DraftStage]:
        """The drafters by name, in order."""
        return {name: stage for name, stage in self.stages.items() if not isinstance(stage, TargetStage)}

    @property
    def orchestrator(self) -> OrchestratorSettings:
        """What the orchestrator is told."""
        return OrchestratorSettings(self.speculation, self.admission, self.timeouts)


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a key twice, of which YAML would silently drop the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[Any] = set()
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                keys.add(key.value)
        return node


_ADAPTER = TypeAdapter(Config)
_STAGE_ADAPTER: TypeAdapter[Stage] = TypeAdapter(TaggedStage)


def load(path: Path | None) -> Config:
    """Reads a configuration file.

    Args:
        path: The file; None for `STAGESPEC_CONFIG`, and where that is not set, for the default pair.

    Raises:
        ConfigError: The file cannot be read, or anything in it is unknown, of the wrong type or out of range.
    """
    if path is None:
        path = Path(os.environ.get("STAGESPEC_CONFIG") or DEFAULT)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping of settings, such as `listen: 127.0.0.1:50051`")
    try:
        return parse(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(content: Mapping[str, Any]) -> Config:
    """Checks the content of a configuration file.

    Raises:
        ConfigError: Anything in it is unknown, of the wrong type or out of range; all faults are named.
    """
    try:
        # JSON mode is what lets strict types come out of plain mappings.
        return _ADAPTER.validate_json(json.dumps(_expand(content, ""), default=str))
    except ValidationError as error:
        raise ConfigError("; ".join(_faults(error, tag=2))) from None


def parse_stage(name: str, content: Mapping[str, Any]) -> Stage:
    """Checks one stage by itself.

    Raises:
        ConfigError: Anything in it is unknown, of the wrong type or out of range, or its files are missing.
    """
    try:
        stage = _STAGE_ADAPTER.validate_json(json.dumps(_expand(content, name), default=str))
    except ValidationError as error:
        raise ConfigError("; ".join(f"stage {name}: {fault}" for fault in _faults(error, tag=0))) from None
    missing = list(missing_files(stage))
    if missing:
        raise ConfigError(f"stage {name}: {'; '.join(missing)}")
    return stage


def override(config: Config, *, listen: str | None = None, launcher: str | None = None) -> Config:
    """The configuration with what the command line says instead; None leaves a setting as it is.

    Raises:
        ConfigError: A value is out of range.
    """
    asked = {"listen": listen, "launcher": launcher}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    try:
        return replace(config, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def dump(config: Config) -> dict[str, Any]:
    """The configuration as plain data with every default filled in: what `parse` would read back."""
    content: dict[str, Any] = _ADAPTER.dump_python(config, mode="json")
    return content


def require_files(config: Config) -> None:
    """Raises ConfigError if files that the stages need are not there, saying how to get them."""
    missing = [
        f"stages.{name}: {problem}"
        for name, stage in config.stages.items()
        for problem in missing_files(stage)
    ]
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        missing.append(f"tokenizer: {config.tokenizer} does not exist")
    if missing:
        raise ConfigError("; ".join(missing))


def _expand(value: Any, where: str) -> Any:
    """Replaces the variables in every string."""
    if isinstance(value, Mapping):
        return {str(key): _expand(entry, f"{where}.{key}".lstrip(".")) for key, entry in value.items()}
    if isinstance(value, list):
        return [_expand(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, str):
        folders = {"cache": cache_folder(), "bundled": BUNDLED}
        unknown = [name for name in _VARIABLE.findall(value) if name not in folders]
        if unknown:
            text = f"${{{unknown[0]}}} is unknown, there are only ${{cache}} and ${{bundled}}"
            raise ConfigError(f"{where} is {value!r}; {text}")
        return _VARIABLE.sub(lambda found: str(folders[found[1]]), value)
    return value


def _faults(error: ValidationError, tag: int) -> Iterator[str]:
    """Each fault as a sentence; `tag` is where pydantic puts the kind of stage, which no file has."""
    for fault in error.errors(include_url=False):
        where = [str(part) for part in fault["loc"]]
        if len(where) > tag and (tag == 0 or where[0] == "stages"):
            del where[tag]
        path = ".".join(where)
        kind = fault["type"]
        if kind == "unexpected_keyword_argument":
            text = "is not a known setting"
        elif kind in ("missing", "missing_argument"):
            text = "is required"
        elif kind == "union_tag_not_found":
            text = "has no kind; it must be ngram, draft or target"
        elif kind == "union_tag_invalid":
            text = f"has the kind {fault['input'].get('kind')!r}; it must be ngram, draft or target"
        elif kind == "value_error":
            yield _prefixed(path, str(fault["ctx"]["error"]))
            continue
        else:
            message = fault["msg"][0].lower() + fault["msg"][1:]
            text = f"is {fault['input']!r}: {message}"
        yield f"{path or 'the file'} {text}"


def _prefixed(path: str, text: str) -> str:
    # Some settings already name themselves by their whole path.
    return text if not path or text.startswith(f"{path}.") else f"{path}.{text}"
