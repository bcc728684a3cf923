"""`stagespec health`: whether a server, or one stage by itself, is well."""

import argparse
import json
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "health",
        help="check a running server or stage",
        description="Exits with 0 if the server serves and its target is ready, else with 1. A drafter that "
        "is down is reported and costs speed only.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="host:port or unix:path")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for each answer (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Asks for the health of the process, then of its stages."""
    from deploy import interrupts

    return interrupts.run(_health(args))


async def _health(args: argparse.Namespace) -> int:
    from deploy.cli.output import pipeline_lines, plain
    from deploy.health import look

    found = await look(args.address, args.timeout)
    if args.json:
        report: dict[str, Any] = {
            "healthy": found.healthy,
            "status": found.status,
            "pipeline": None if found.pipeline is None else plain(found.pipeline),
            "stage": None if found.stage is None else plain(found.stage),
        }
        print(json.dumps(report))
    else:
        print(f"{args.address}: {found.status.lower().replace('_', ' ')}")
        for line in () if found.pipeline is None else pipeline_lines(found.pipeline):
            print(line)
        if found.stage is not None:
            print(f"stage {found.stage.name}: {found.stage.implementation} {found.stage.model}".rstrip())
    return 0 if found.healthy else 1
