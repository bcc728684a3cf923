"""`stagespec serve`: a whole deployment, until it is told to end."""

import argparse
import logging
from typing import TYPE_CHECKING

from deploy.cli.arguments import add_config, load_config

if TYPE_CHECKING:
    from deploy.config import Config


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "serve",
        help="run all stages and the public API",
        description="Starts every stage and the public API, and drains them on SIGINT or SIGTERM.",
    )
    parser.add_argument("--listen", metavar="ADDRESS", help="host:port or unix:path, instead of the file's")
    add_config(parser)
    parser.set_defaults(run=run, log_level=logging.INFO)


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to end."""
    from deploy import interrupts

    return interrupts.run(_serve(load_config(args, listen=args.listen)), interrupted=0)


async def _serve(config: "Config") -> int:
    import asyncio

    from deploy.cli.output import note, pipeline_lines
    from deploy.client import Client
    from deploy.serve import running

    async with running(config, note) as address:
        async with Client(address) as client:
            for line in pipeline_lines(await client.get_pipeline()):
                note(line)
        # Programs wait for this line.
        print(f"listening on {address}", flush=True)
        await asyncio.Event().wait()
    return 0
