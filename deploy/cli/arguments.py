"""What several subcommands read from the command line alike."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.config import Config


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Which configuration to read."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Which deployment to run."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration file; default: STAGESPEC_CONFIG, then the built-in one",
    )
    parser.add_argument("--launcher", choices=("ray", "process"), help="instead of the configuration's")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which server to use: a running one, or one of its own."""
    parser.add_argument(
        "--target", metavar="ADDRESS", help="a running server; without it one is started and stopped again"
    )
    add_config(parser)


def add_chain_length(parser: "argparse._ActionsContainer") -> None:
    """How long the drafts of mode chain are."""
    parser.add_argument(
        "--chain-length", type=positive, metavar="K", help="tokens in a draft of mode chain; default: 5"
    )


def load_config(args: argparse.Namespace, *, listen: str | None = None) -> "Config":
    """The configuration that the arguments of `add_config` name.

    Args:
        args: The arguments.
        listen: Address to serve on instead of the configuration's.

    Raises:
        ConfigError: It is wrong.
    """
    from deploy.config import load, override

    return override(load(args.config), listen=listen, launcher=args.launcher)


def duration(text: str) -> float:
    """An argparse type for seconds from 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds from 0")
    return value


def positive(text: str) -> int:
    """An argparse type for whole numbers from 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
