"""`stagespec check-config`: says what is wrong with a configuration before anything starts."""

import argparse
import json

from deploy.cli.arguments import add_config, load_config


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "check-config",
        help="check a configuration",
        description="Checks every setting and that the files of the stages are there. Starts nothing.",
    )
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print the settings with every default filled in")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks it."""
    from deploy.config import dump, require_files

    config = load_config(args)
    require_files(config)
    if args.json:
        print(json.dumps(dump(config)))
        return 0
    drafters = ", ".join(f"{name} ({stage.kind})" for name, stage in config.drafters.items()) or "no drafters"
    target, stage = config.target
    print(
        f"ok: {drafters}, then {target} ({stage.settings.model}), on {config.listen}, "
        f"launcher {config.launcher}"
    )
    return 0
