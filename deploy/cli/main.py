"""The `stagespec` command: finds the subcommand, and turns failures into one line and an exit code."""

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence

from deploy.errors import SetupError

# Each is a module here with add_parser(subparsers) and run(args); it imports what it needs when it runs.
COMMANDS = (
    "serve",
    "stage",
    "fetch",
    "generate",
    "bench",
    "pipeline",
    "build_ngram",
    "train_draft",
    "health",
    "check_config",
)


def parser() -> argparse.ArgumentParser:
    """The command line of all subcommands."""
    root = argparse.ArgumentParser(prog="stagespec", description="Staged speculative decoding over gRPC.")
    subparsers = root.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"deploy.cli.{name}").add_parser(subparsers)
    for leaf in _leaves(root):
        leaf.add_argument(
            "--debug", action="store_true", help="log everything; tracebacks instead of one line"
        )
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Returns:
        Its exit code: 0 if all went well, 1 if it failed, 2 if the arguments are wrong.
    """
    try:
        # Importing what the arguments need takes long enough to be interrupted.
        return _run(parser().parse_args(arguments))
    except KeyboardInterrupt:
        return 130  # 128 and the number of SIGINT, as shells have it


def _run(args: argparse.Namespace) -> int:
    level = logging.DEBUG if args.debug else getattr(args, "log_level", logging.WARNING)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from stagespec.rpc import RpcError

    try:
        code: int = args.run(args)
    except (SetupError, RpcError) as error:
        return _fail(str(error), args.debug)
    except BrokenPipeError:
        return 1  # whoever read our output has seen enough
    except Exception as error:
        # One line here too: what a person cannot act on, --debug shows whole.
        return _fail(f"{type(error).__name__}: {' '.join(str(error).split())}", args.debug)
    return code


def _fail(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"stagespec: {text}", file=sys.stderr)
    return 1


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    choices = [
        child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for child in action.choices.values()
    ]
    if not choices:
        yield parser
    for child in choices:
        yield from _leaves(child)


if __name__ == "__main__":
    sys.exit(main())
