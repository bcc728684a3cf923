"""`stagespec fetch`: prepares the default pair."""

import argparse
import json


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "fetch",
        help="prepare the default models, once",
        description="Downloads and converts the default target, makes its drafters and gets the prompts. "
        "What is there and whole stays; the folder is STAGESPEC_CACHE, or ~/.cache/stagespec.",
    )
    parser.add_argument("--force", action="store_true", help="make everything anew")
    parser.add_argument("--json", action="store_true", help="print the paths as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepares what is missing."""
    from deploy import fetch
    from deploy.cli.output import note
    from deploy.config import BUNDLED

    folder = fetch.fetch(force=args.force, report=note)
    if args.json:
        names = {"target": fetch.TARGET, "table": fetch.TABLE, "prompts": fetch.PROMPTS}
        paths = {key: str(folder / name) for key, name in names.items()}
        paths["draft"] = str(BUNDLED / fetch.TARGET)
        print(json.dumps({"cache": str(folder), **paths}))
    return 0
