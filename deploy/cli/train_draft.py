"""`stagespec train-draft`: a draft for any target, from what the target itself writes.

It knows arguments, prompts and printing; `services.training` does the work.
"""

import argparse
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import positive
from deploy.errors import SetupError
from deploy.python_sources import STANDARD_LIBRARY, python_files
from services.cache import cache_folder

if TYPE_CHECKING:
    from orchestrator.text import TextCodec
    from services.causal_lm.settings import ModelSettings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a draft model for a target",
        description="First `collect` what the target writes, then `fit` a draft to it. Both go on where they "
        "were cut short when the same command is given again.",
    )
    steps = parser.add_subparsers(metavar="STEP", required=True)
    _add_collect(
        steps.add_parser("collect", help="let the target continue prompts and keep what it computed")
    )
    _add_fit(steps.add_parser("fit", help="train a draft on a collection"))


def _add_collect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=str(cache_folder() / "smollm2-135m-instruct"), help="the target: folder or hub id"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the collection goes")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with `prompt` or `messages`")
    source.add_argument(
        "--python-sources",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="prompts are made of the documented functions in them; default: Python's standard library",
    )
    parser.add_argument("--num-prompts", type=positive, metavar="N", help="default: all there are")
    parser.add_argument(
        "--chat-share", type=float, default=0.15, help="made prompts that are chat requests (0.15)"
    )
    parser.add_argument("--greedy-share", type=float, default=0.5, help="prompts continued greedily (0.5)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled ones (1)")
    parser.add_argument("--top-k", type=int, default=50, help="of the sampled ones; 0 for all tokens (50)")
    parser.add_argument(
        "--max-prompt-tokens", type=positive, default=192, help="longer ones are left out (192)"
    )
    parser.add_argument("--max-tokens", type=positive, default=160, help="tokens to draw for each (160)")
    parser.add_argument("--batch-size", type=positive, default=32, help="prompts at once (32)")
    parser.add_argument("--seed", type=int, default=0, help="of order and draws (0)")
    _add_model(parser)
    parser.set_defaults(run=_collect)


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("collection", type=Path, metavar="COLLECTION", help="made by `collect`")
    parser.add_argument(
        "--model", default=str(cache_folder() / "smollm2-135m-instruct"), help="the target: folder or hub id"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the draft goes")
    parser.add_argument(
        "--kind", choices=("feature", "causal_lm"), default="feature", help="see README (feature)"
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="default: 2, or 4 for causal_lm")
    parser.add_argument("--hidden", type=positive, metavar="N", help="of a causal_lm; default: 256")
    parser.add_argument("--head-tokens", type=positive, default=8192, help="tokens the head knows (8192)")
    parser.add_argument("--epochs", type=positive, default=4, help="passes over the collection (4)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest (0.001)")
    parser.add_argument("--batch-size", type=positive, default=16, help="sequences of a step (16)")
    parser.add_argument("--block", type=positive, default=6, help="drafted levels to train for (6)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and order (0)")
    parser.add_argument("--store", choices=("int8", "float16"), default="int8", help="on disk (int8)")
    parser.add_argument("--device", default="cpu", help="such as cuda:0 (cpu)")
    parser.add_argument("--threads", type=positive, metavar="N", help="default: all")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="default: OUT.checkpoint, removed at the end"
    )
    parser.set_defaults(run=_fit)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="such as cuda:0 (cpu)")
    parser.add_argument("--dtype", default="float32", help="of activations (float32)")
    parser.add_argument("--weight-format", help="on the CPU: float32, float16, int8; default: as --dtype")
    parser.add_argument("--threads", type=positive, metavar="N", help="default: all")


def _collect(args: argparse.Namespace) -> int:
    """Collects; returns the exit status.

    Raises:
        SetupError: An argument, the prompts, the model or the folder is at fault.
    """
    from orchestrator.text import TextCodec
    from services.causal_lm.check import UnservableModelError
    from services.causal_lm.load import load
    from services.training.collect import collect, plan
    from services.training.collection import CollectionError

    for name in ("chat_share", "greedy_share"):
        value = getattr(args, name)
        if not 0.0 <= value <= 1.0:
            raise SetupError(f"--{name.replace('_', '-')} is {value} and must be from 0 to 1")
    if not 0.0 < args.temperature <= 100.0 or args.top_k < 0:
        text = f"--temperature is {args.temperature} and --top-k {args.top_k}"
        raise SetupError(f"{text}; they must be above 0, at most 100, and at least 0")
    settings = _model_settings(args)
    try:
        codec = TextCodec.load(_folder(args.model))
        prompts = _prompts(args, codec)
        loaded = load(settings)
    except (UnservableModelError, ValueError) as error:
        raise SetupError(str(error)) from error
    begin = time.monotonic()

    def report(num_parts: int, num_complete: int, num_drawn: int) -> None:
        seconds = time.monotonic() - begin
        print(
            f"part {num_complete} of {num_parts}, {num_drawn} tokens, {num_drawn / seconds:.0f} a second",
            file=sys.stderr,
            flush=True,
        )

    content = {"seed": args.seed, "greedy_share": args.greedy_share, "prompts": _digest(prompts)}
    if (args.temperature, args.top_k) != (1.0, 50):
        content |= {"temperature": args.temperature, "top_k": args.top_k}
    try:
        collect(
            loaded,
            plan(prompts, args.greedy_share, args.seed, args.temperature, args.top_k or None),
            args.out,
            content,
            batch_size=args.batch_size,
            max_tokens=args.max_tokens,
            report=report,
        )
    except (CollectionError, ValueError, OSError) as error:
        raise SetupError(str(error)) from error
    print(f"{args.out}: what the target wrote for {len(prompts)} prompts")
    return 0


def _fit(args: argparse.Namespace) -> int:
    """Trains; returns the exit status.

    Raises:
        SetupError: An argument, the collection, the target or a checkpoint is at fault.
    """
    from services.causal_lm.check import UnservableModelError
    from services.draft.artifact import ArtifactError
    from services.training.collection import CollectionError
    from services.training.fit import FitError, FitSettings, fit

    command = "stagespec train-draft " + " ".join(shlex.quote(word) for word in sys.argv[2:])
    begin = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {text}", file=sys.stderr, flush=True)

    try:
        settings = FitSettings(
            kind=args.kind,
            num_layers=args.layers or (2 if args.kind == "feature" else 4),
            hidden_size=args.hidden or 256,
            num_kept=args.head_tokens,
            num_epochs=args.epochs,
            learning_rate=args.learning_rate,
            batch_size=args.batch_size,
            block=args.block,
            seed=args.seed,
        )
        found = fit(
            args.collection,
            _folder(args.model),
            args.out,
            settings,
            checkpoint=args.checkpoint or args.out.with_name(args.out.name + ".checkpoint"),
            weight_format=args.store,
            device=args.device,
            num_threads=args.threads,
            command=command,
            report=report,
        )
    except (ArtifactError, CollectionError, FitError, UnservableModelError, ValueError, OSError) as error:
        raise SetupError(str(error)) from error
    for name, value in found.items():
        print(f"{name:>28}  {value:.3f}" if isinstance(value, float) else f"{name:>28}  {value}")
    print(f"{args.out}: the draft, ready to be served")
    return 0


def _model_settings(args: argparse.Namespace) -> "ModelSettings":
    from services.causal_lm.settings import ModelSettings

    try:
        return ModelSettings(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            weight_format=args.weight_format,
            num_threads=args.threads,
            max_sessions=args.batch_size,
        )
    except ValueError as error:
        raise SetupError(str(error)) from error


def _prompts(args: argparse.Namespace, codec: "TextCodec") -> list[list[int]]:
    """Token ids of the prompts, those that are too long left out."""
    encode = _reader(args, codec)
    found = [ids for ids in encode() if 0 < len(ids) <= args.max_prompt_tokens][: args.num_prompts]
    if not found:
        raise SetupError(f"no prompt has from 1 to {args.max_prompt_tokens} tokens")
    return found


def _reader(args: argparse.Namespace, codec: "TextCodec") -> "Callable[[], list[list[int]]]":
    from deploy.prompts import read_prompts

    def from_file() -> list[list[int]]:
        prompts = read_prompts(args.prompts, None)
        random.Random(args.seed).shuffle(prompts)
        return [
            codec.encode(prompt.text)
            if prompt.text is not None
            else codec.encode_chat([{"role": role, "content": text} for role, text in prompt.messages])
            for prompt in prompts
        ]

    def from_sources() -> list[list[int]]:
        from services.training.prompts import read_stubs, request_of, shuffled

        stubs = shuffled(read_stubs(_python_files(args.python_sources)), args.seed)
        rng = random.Random(args.seed)
        made = []
        # Each stub twice, so that it is continued greedily and by sampling, far apart.
        for stub in [*stubs, *stubs]:
            if codec.chat_template is not None and rng.random() < args.chat_share:
                made.append(codec.encode_chat([{"role": "user", "content": request_of(stub, rng)}]))
            else:
                made.append(codec.encode(stub.source))
        return made

    return from_file if args.prompts is not None else from_sources


def _python_files(folders: Sequence[Path] | None) -> list[Path]:
    """Python files, those of tests left out, in a fixed order."""
    found: list[Path] = []
    for folder in folders or [STANDARD_LIBRARY]:
        if not folder.is_dir():
            raise SetupError(f"--python-sources names {folder}, which is no folder")
        found += python_files(folder)
    if not found:
        raise SetupError("the folders of --python-sources hold no Python files")
    return found


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    import hashlib

    return hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()


def _folder(model: str) -> Path:
    from transformers.utils.hub import cached_file

    if Path(model).is_dir():
        return Path(model)
    path: Any = cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise SetupError(f"{model} is neither a folder nor a model of the hub with a tokenizer.json")
    return Path(path).parent
