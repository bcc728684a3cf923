"""`stagespec pipeline`: shows the stages of a running server and changes its drafters."""

import argparse
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from deploy.client import Client

Action = Callable[["Client", argparse.Namespace], Coroutine[Any, Any, int]]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "pipeline", help="look at the stages of a running server, and change its drafters"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "show", _show, "show every stage, and why any is idle")

    check = _add(actions, "check", _check, "test whether a drafter would fit, and change nothing")
    check.add_argument("drafter", metavar="DRAFTER_ADDRESS", help="where the drafter listens")

    add = _add(actions, "add", _add_drafter, "put a drafter into the pipeline")
    add.add_argument("name", metavar="NAME", help="its name in the pipeline")
    add.add_argument("drafter", metavar="DRAFTER_ADDRESS", help="where it listens")
    add.add_argument("--index", type=int, help="its place from 0; default: the end")

    swap = _add(actions, "swap", _swap, "replace a drafter by another")
    swap.add_argument("name", metavar="NAME", help="the drafter to replace")
    swap.add_argument("drafter", metavar="DRAFTER_ADDRESS", help="where its successor listens")
    swap.add_argument(
        "--as", dest="successor", metavar="NAME", help="the successor's name; default: the same"
    )

    remove = _add(actions, "remove", _remove, "take a drafter out")
    remove.add_argument("name", metavar="NAME", help="the drafter")


def _add(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, action: Action, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--target", default="127.0.0.1:50051", metavar="ADDRESS", help="the server (127.0.0.1:50051)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, action=action)
    return parser


def run(args: argparse.Namespace) -> int:
    """Does what the action says."""
    from deploy import interrupts
    from deploy.client import Client

    async def act() -> int:
        async with Client(args.target) as client:
            return await args.action(client, args)  # type: ignore[no-any-return]

    return interrupts.run(act())


async def _show(client: "Client", args: argparse.Namespace) -> int:
    from deploy.cli.output import pipeline_lines

    pipeline = await client.get_pipeline()
    running = f"{pipeline.num_running_requests} requests running, {pipeline.num_waiting_requests} waiting"
    _print(args, pipeline, *pipeline_lines(pipeline), running)
    return 0


async def _check(client: "Client", args: argparse.Namespace) -> int:
    from stagespec.v1.pipeline_pb2 import CheckDrafterRequest, DrafterAddress

    drafter = DrafterAddress(address=args.drafter)
    found = await client.call(client.pipeline.CheckDrafter, CheckDrafterRequest(drafter=drafter))
    lines = [f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}" for check in found.checks]
    _print(args, found, *lines, "compatible" if found.compatible else "not compatible")
    return 0 if found.compatible else 1


async def _add_drafter(client: "Client", args: argparse.Namespace) -> int:
    from stagespec.v1.pipeline_pb2 import AddDrafterRequest, DrafterAddress

    drafter = DrafterAddress(name=args.name, address=args.drafter)
    request = AddDrafterRequest(drafter=drafter, index=args.index)
    return _changed(args, await client.call(client.pipeline.AddDrafter, request))


async def _swap(client: "Client", args: argparse.Namespace) -> int:
    from stagespec.v1.pipeline_pb2 import DrafterAddress, SwapDrafterRequest

    successor = DrafterAddress(name=args.successor or args.name, address=args.drafter)
    request = SwapDrafterRequest(name=args.name, successor=successor)
    return _changed(args, await client.call(client.pipeline.SwapDrafter, request))


async def _remove(client: "Client", args: argparse.Namespace) -> int:
    from stagespec.v1.pipeline_pb2 import RemoveDrafterRequest

    request = RemoveDrafterRequest(name=args.name)
    return _changed(args, await client.call(client.pipeline.RemoveDrafter, request))


def _changed(args: argparse.Namespace, response: Any) -> int:
    _print(args, response, "drafters: " + (", ".join(response.drafters) or "none; decoding is plain"))
    return 0


def _print(args: argparse.Namespace, message: "Message", *lines: str) -> None:
    from deploy.cli.output import plain

    print(json.dumps(plain(message)) if args.json else "\n".join(lines))
