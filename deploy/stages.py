"""The kinds of stage that can be deployed, and how one becomes a server.

Importing this costs no model library; building a stage imports what that stage needs.
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator

from deploy.errors import StageFailedError
from deploy.model_libraries import quiet
from services.cache import cache_folder
from services.draft.settings import DraftSettings
from services.ngram.settings import NgramSettings
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from services.host import StageServer


@dataclass(frozen=True, slots=True)
class RayResources:
    """What a stage reserves when Ray places it.

    Attributes:
        num_cpus: CPU cores, fractions allowed. They order placement and limit nothing; threads are a setting
            of the stage.
        num_gpus: GPUs, fractions allowed. Fractions share a device and its memory.
    """

    num_cpus: float = 0.1
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        # Ray places nothing that reserves nothing.
        if not 0.001 <= self.num_cpus <= 1024:
            raise ValueError(f"num_cpus is {self.num_cpus} and must be from 0.001 to 1024")
        if not 0 <= self.num_gpus <= 1024:
            raise ValueError(f"num_gpus is {self.num_gpus} and must be from 0 to 1024")


@dataclass(frozen=True, slots=True)
class NgramStage:
    """An n-gram drafter."""

    kind: Literal["ngram"]
    settings: NgramSettings = field(default_factory=NgramSettings)
    listen: str = "127.0.0.1:0"
    ray: RayResources = field(default_factory=RayResources)

    def __post_init__(self) -> None:
        check_listen(self.listen)


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A draft model."""

    kind: Literal["draft"]
    settings: DraftSettings
    listen: str = "127.0.0.1:0"
    ray: RayResources = field(default_factory=RayResources)

    def __post_init__(self) -> None:
        check_listen(self.listen)


@dataclass(frozen=True, slots=True)
class TargetStage:
    """The target."""

    kind: Literal["target"]
    settings: TargetSettings
    listen: str = "127.0.0.1:0"
    ray: RayResources = field(default_factory=RayResources)

    def __post_init__(self) -> None:
        check_listen(self.listen)


Stage = NgramStage | DraftStage | TargetStage
TaggedStage = Annotated[Stage, Discriminator("kind")]


def check_listen(address: str) -> None:
    """Raises ValueError unless `address` is "host:port" or "unix:path"."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        # The length of sun_path, which the kernel fixes.
        if not 1 <= len(path.encode()) <= 107:
            raise ValueError(f"listen is {address!r}; the path must have 1 to 107 bytes")
        return
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(
            f"listen is {address!r}; it must be host:port (0 for any free port; IPv6 as [::1]:0) or unix:path"
        )


def _is_host(text: str) -> bool:
    if not text.startswith("["):
        return bool(text) and not set(text) & set(":[]/ ")
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return text.endswith("]")


def missing_files(stage: Stage) -> Iterator[str]:
    """The local files a stage needs that are not there, each as "path (what to do)"."""
    if isinstance(stage, NgramStage):
        paths = [stage.settings.table]
    else:
        paths = [stage.settings.model, stage.settings.target if isinstance(stage, DraftStage) else None]
    for path in paths:
        if path is not None and not Path(path).exists():
            yield from _missing(stage, path)


def _missing(stage: Stage, path: str) -> Iterator[str]:
    if Path(path).is_relative_to(cache_folder()):
        yield f"{path} is missing: run `stagespec fetch`"
    elif path.startswith(("/", ".", "~")) or isinstance(stage, NgramStage):
        yield f"{path} does not exist"


def build(name: str, stage: Stage) -> "StageServer":
    """Loads what a stage computes and wraps it in a server that does not listen yet.

    Raises:
        StageFailedError: Its settings or its model are at fault, or loading failed in any other way.
    """
    try:
        return _build(name, stage)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise StageFailedError(f"stage {name}: {text}") from error


def _build(name: str, stage: Stage) -> "StageServer":
    from services.host import StageServer

    max_sessions = stage.settings.max_sessions
    if isinstance(stage, NgramStage):
        from services.ngram.engine import NgramEngine

        return StageServer(name, NgramEngine(stage.settings), max_sessions=max_sessions)
    quiet()
    if isinstance(stage, DraftStage):
        from services.draft.engine import DraftEngine

        return StageServer(name, DraftEngine(stage.settings), max_sessions=max_sessions)
    from services.target.engine import TargetEngine

    return StageServer(name, TargetEngine(stage.settings), max_sessions=max_sessions)
