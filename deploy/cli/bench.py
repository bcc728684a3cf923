"""`stagespec bench`: how fast each way of decoding is here and what drafts bring, or if all give the same."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import add_chain_length, add_server, load_config, positive

if TYPE_CHECKING:
    from deploy.bench.settings import Settings, Variant
    from deploy.config import Config

SPEED_OPTIONS = (
    *("modes", "sampling", "peers", "parts", "pairs"),
    *("contexts", "rows", "prompt_lengths", "sessions", "gguf", "out"),
    *("budgets", "chain_length"),
)
EXACT_OPTIONS = ("temperature", "top_k", "top_p", "seed")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and what drafts bring, or check that all modes give the same tokens",
        description="Measures own modes through the served pipeline beside other programs, in turns, and how "
        "near the machine's limit each comes. The part speculation counts what drafts bring, however "
        "fast that goes. With --check-exact it compares tokens instead and exits with 1 if they differ "
        "beyond rounding.",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--suite", metavar="NAME", help="prompts by name; default: humaneval, the only one")
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with `prompt` or `messages`"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="use the first N prompts only")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="default: 64")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_server(parser)
    parser.add_argument(
        "--weight-format",
        type=_names,
        metavar="LIST",
        help="of target and draft; each gets a server of its own; default: as configured",
    )
    parser.add_argument(
        "--kernel", type=_names, metavar="LIST", help="what computes their forward passes; likewise"
    )
    parser.add_argument(
        "--max-nodes",
        type=positive,
        nargs="+",
        metavar="N",
        help="most nodes in a draft; default: the server's; with --check-exact, which takes several, "
        "staged is compared with each of them too",
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help="requests at once, of the part speculation or of --check-exact; default: 8, or 1",
    )
    _add_speed(parser.add_argument_group("speed and drafts (lists are separated by commas)"))
    _add_exact(parser.add_argument_group("tokens"))
    parser.set_defaults(run=run)


def _add_speed(group: argparse._ArgumentGroup) -> None:
    listed: dict[str, Any] = {"type": _names, "metavar": "LIST"}
    numbers: dict[str, Any] = {"type": _numbers, "metavar": "LIST"}
    group.add_argument("--modes", **listed, help="off, ngram, draft, staged, chain; default: off")
    group.add_argument("--sampling", **listed, help="greedy, topk50; default: greedy")
    group.add_argument("--peers", **listed, help="hf, llamacpp-f32, llamacpp-f16, llamacpp-q4; default: none")
    group.add_argument(
        "--parts",
        **listed,
        help="generate, prefill, sessions, verify, quality, speculation; default: all but the last",
    )
    group.add_argument(
        "--pairs", type=positive, metavar="N", help="least pairs of runs behind a ratio; default: 5"
    )
    group.add_argument("--contexts", **numbers, help="of verify passes; default: 256,1024,4096")
    group.add_argument("--rows", **numbers, help="of verify passes; default: 1,2,4,8,16,32,64")
    group.add_argument("--prompt-lengths", **numbers, help="of prefills; default: 512,2048")
    group.add_argument("--sessions", **numbers, help="requests at once; default: 1,2,4,8")
    group.add_argument("--budgets", **numbers, help="--max-nodes to count drafts with too; default: none")
    add_chain_length(group)
    group.add_argument("--gguf", type=Path, metavar="FILE", help="the target for llama.cpp; default: bundled")
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep records and plots here; a run cut short goes on"
    )


def _add_exact(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--check-exact", action="store_true", help="compare tokens; the rest goes with it")
    group.add_argument("--temperature", type=float, metavar="T", help="default: 0, greedy")
    group.add_argument("--top-k", type=positive, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--seed", type=int, metavar="N", help="of the draws; default: 0")


def run(args: argparse.Namespace) -> int:
    """Measures or compares."""
    from deploy import interrupts
    from deploy.bench.settings import SUITES
    from deploy.errors import SetupError

    if args.suite is not None and args.suite not in SUITES:
        raise SetupError(f"--suite {args.suite!r} is unknown; there are {', '.join(SUITES)}")
    if args.target is not None and (args.weight_format or args.kernel):
        raise SetupError("--weight-format and --kernel start servers and do not go with --target")
    if args.check_exact:
        _refuse(args, SPEED_OPTIONS, "do not go with --check-exact")
        from deploy.cli import bench_exact

        return interrupts.run(bench_exact.check(args))
    _refuse(args, EXACT_OPTIONS, "go with --check-exact only")
    return interrupts.run(_bench(args, _settings(args)))


def _refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    from deploy.errors import SetupError

    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise SetupError(f"{', '.join(given)}: such options {why}")


def _settings(args: argparse.Namespace) -> "Settings":
    """What the arguments ask for.

    Raises:
        SetupError: They ask for something that is not there, or that does not go together.
    """
    from deploy.bench.settings import Settings, Variant
    from deploy.errors import SetupError

    changes = {"max_tokens": args.max_tokens, "variants": _variants(args, Variant)}
    names = {
        **{"modes": "modes", "sampling": "samplings", "peers": "peers", "parts": "parts"},
        **{"pairs": "num_pairs", "contexts": "contexts", "rows": "row_counts"},
        **{"prompt_lengths": "prompt_lengths", "sessions": "session_counts"},
        **{"budgets": "budgets", "chain_length": "chain_length"},
    }
    for option, name in names.items():
        if getattr(args, option) is not None:
            changes[name] = getattr(args, option)
    if args.max_nodes is not None:
        if len(args.max_nodes) > 1:
            raise SetupError("--max-nodes: several go with --check-exact only; --budgets counts with several")
        changes["max_nodes"] = args.max_nodes[0]
    if "speculation" not in (args.parts or ()):
        _refuse(args, ("budgets", "concurrency"), "go with --parts speculation or --check-exact")
    if args.target is not None:
        if args.parts is None:
            changes["parts"] = ("generate", "prefill", "sessions")
        elif {"verify", "quality"} & set(args.parts):
            text = "--parts verify or quality loads the configured target and does not go with --target"
            raise SetupError(text)
    try:
        return Settings(**changes)
    except ValueError as error:
        raise SetupError(str(error)) from error


def _variants(args: argparse.Namespace, variant: "type[Variant]") -> "tuple[Variant, ...]":
    formats, kernels = args.weight_format or (None,), args.kernel or (None,)
    return tuple(variant(weight_format, kernel) for weight_format in formats for kernel in kernels)


async def _bench(args: argparse.Namespace, settings: "Settings") -> int:
    import asyncio

    from deploy.bench.bench import Bench
    from deploy.bench.records import Records
    from deploy.bench.run import measure
    from deploy.cli.output import note
    from deploy.prompts import read_prompts

    prompts = read_prompts(args.prompts, args.limit)
    config = _config(args, settings)
    with Records(args.out, _identity(args, settings, config)) as records:
        bench = Bench(settings, prompts, config, args.target, args.gguf, records, note)
        if args.concurrency is not None:
            bench.concurrency = args.concurrency
        try:
            await measure(bench)
        except asyncio.CancelledError:
            note("interrupted")
            _print(args, settings, len(prompts), records)
            raise
        _print(args, settings, len(prompts), records)
    return 0


def _config(args: argparse.Namespace, settings: "Settings") -> "Config":
    """The configuration to run.

    Raises:
        SetupError: A variant does not fit it.
    """
    from deploy.bench.served import with_variant
    from deploy.cli.output import note
    from deploy.config import override
    from deploy.errors import SetupError

    config = load_config(args, listen="127.0.0.1:0")
    for variant in settings.variants:
        with_variant(config, variant)
    if len(settings.variants) > 1 and config.launcher == "ray" and args.target is None:
        if args.launcher == "ray":
            raise SetupError("--launcher ray runs one server at a time; give one weight format and kernel")
        note("several servers at once run as plain processes, not under Ray")
        config = override(config, launcher="process")
    return config


def _identity(args: argparse.Namespace, settings: "Settings", config: "Config") -> dict[str, Any]:
    """Everything that figures depend on, to tell whether a run can go on with earlier records."""
    import hashlib

    from deploy.config import dump
    from deploy.prompts import read_prompts

    prompts = repr(read_prompts(args.prompts, args.limit)).encode()
    return {
        **settings.plain(),
        "prompts": hashlib.sha256(prompts).hexdigest()[:16],
        "config": dump(config),
        "target": args.target,
        "gguf": None if args.gguf is None else str(args.gguf),
    }


def _print(args: argparse.Namespace, settings: "Settings", num_prompts: int, records: Any) -> None:
    import json

    from deploy.bench.plots import write_plots
    from deploy.bench.report import build_report
    from deploy.bench.tables import show
    from deploy.cli.output import note

    report = build_report(settings, num_prompts, records)
    if args.out is not None:
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for path in write_plots(report, args.out):
            note(f"written: {path}")
    if args.json:
        print(json.dumps(report))
    else:
        for line in show(report):
            print(line)


def _names(text: str) -> tuple[str, ...]:
    """An argparse type for a list of names."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name in it")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    """An argparse type for a list of whole numbers from 1, sorted."""
    return tuple(sorted(positive(part) for part in text.split(",")))
