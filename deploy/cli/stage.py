"""`stagespec stage`: one stage alone, by hand; a server or another orchestrator can then use it."""

import argparse
import dataclasses
import inspect
import logging
import re
import types
import typing
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import add_config_file, duration
from services.draft.settings import DraftSettings
from services.ngram.settings import NgramSettings
from services.target.settings import TargetSettings

if TYPE_CHECKING:
    from deploy.stages import Stage

_SETTINGS: dict[str, type[Any]] = {"ngram": NgramSettings, "draft": DraftSettings, "target": TargetSettings}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command, with a flag for each setting of each kind of stage."""
    parser = subparsers.add_parser("stage", help="run one stage alone")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for kind, settings in _SETTINGS.items():
        text = f"serve one {kind} stage"
        child = kinds.add_parser(
            kind,
            help=text,
            description=f"{text.capitalize()} until SIGINT or SIGTERM. Its settings come from flags, or from "
            "the stage of that name in a configuration, which flags override.",
        )
        child.add_argument("--listen", metavar="ADDRESS", help="host:port (0 for any port) or unix:path")
        child.add_argument("--name", help=f"name of the stage; default: {kind}")
        child.add_argument(
            "--grace", type=duration, default=10.0, help="seconds for live sessions at the end (10)"
        )
        add_config_file(child)
        for field in dataclasses.fields(settings):
            _add_setting(child, settings, field)
        child.set_defaults(run=run, kind=kind, log_level=logging.INFO)


def run(args: argparse.Namespace) -> int:
    """Serves the stage."""
    import asyncio

    from deploy.errors import SetupError
    from deploy.stage_process import serve_stage
    from deploy.stages import build

    name = args.name or args.kind
    stage = _stage(name, args)

    def announce(address: str) -> None:
        # Programs wait for this line.
        print(f"listening on {address}", flush=True)

    server = build(name, stage)
    try:
        asyncio.run(serve_stage(server, stage.listen, args.grace, announce))
    except OSError as error:
        raise SetupError(str(error)) from error
    return 0


def _stage(name: str, args: argparse.Namespace) -> "Stage":
    """The stage that the arguments describe.

    Raises:
        ConfigError: A setting is missing or out of range.
    """
    from deploy.config import load, parse_stage
    from deploy.errors import ConfigError

    content: dict[str, Any] = {"kind": args.kind, "settings": {}}
    if args.config is not None:
        stages = load(args.config).stages
        if name not in stages or stages[name].kind != args.kind:
            there = ", ".join(f"{each} ({stage.kind})" for each, stage in stages.items())
            raise ConfigError(f"{args.config} has no stage {name!r} of kind {args.kind}; it has {there}")
        content = dataclasses.asdict(stages[name])
    for field in dataclasses.fields(_SETTINGS[args.kind]):
        value = getattr(args, f"setting_{field.name}")
        if value is not None:
            content["settings"][field.name] = value
    if args.listen is not None:
        content["listen"] = args.listen
    return parse_stage(name, content)


def _add_setting(
    parser: argparse.ArgumentParser, settings: type[Any], field: "dataclasses.Field[Any]"
) -> None:
    default = "required" if field.default is dataclasses.MISSING else f"default: {field.default}"
    parser.add_argument(
        f"--{field.name.replace('_', '-')}",
        dest=f"setting_{field.name}",
        type=_plain_type(typing.get_type_hints(settings)[field.name]),
        metavar="VALUE",
        help=f"{_documentation(settings, field.name)} ({default})".replace("%", "%%"),
    )


def _documentation(settings: type[Any], name: str) -> str:
    """What the docstring of a settings class, or of one it extends, says about an attribute."""
    for each in settings.__mro__:
        documentation = inspect.cleandoc(each.__doc__ or "")
        match = re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", documentation, re.MULTILINE)
        if match is not None:
            return " ".join(match[1].split()).removesuffix(".")
    return name


def _plain_type(hint: Any) -> type[Any]:
    """The type of a value on the command line: that of "int | None" is int."""
    if isinstance(hint, types.UnionType):
        hint = next(each for each in hint.__args__ if each is not type(None))
    return hint if hint in (int, float) else str
