"""`stagespec build-ngram`: an n-gram table from text files.

It knows arguments, progress and printing; `services.ngram.builder` does the work.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import SetupError

if TYPE_CHECKING:
    from services.ngram.builder import BuildSummary

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "build-ngram",
        help="build an n-gram table from text files",
        description="Counts the n-grams of UTF-8 text files and writes a table for the n-gram drafter.",
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="text to count")
    parser.add_argument(
        "--from-collection",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="count what a model wrote too: a folder made by `train-draft collect`; may be repeated",
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FOLDER", help="folder with tokenizer.json"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the table goes")
    parser.add_argument("--order", type=int, default=3, help="length of the longest n-grams, 2 to 5 (3)")
    parser.add_argument(
        "--max-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="largest table, such as 16M; rare n-grams go first",
    )
    parser.add_argument(
        "--min-count", type=int, default=1, help="leave out n-grams of 2 or more tokens that are rarer (1)"
    )
    parser.add_argument(
        "--suffix",
        action="append",
        default=[],
        help="take only files of folders whose names end so, such as .py; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Builds the table; returns the exit status.

    Raises:
        SetupError: An argument or the corpus is wrong; nothing was written.
    """
    from tokenizers import Tokenizer

    from services.ngram.builder import build_table

    if not args.paths and not args.from_collection:
        raise SetupError("there is nothing to count: name files, folders or --from-collection")
    definition = args.tokenizer / "tokenizer.json"
    if not definition.is_file():
        raise SetupError(f"--tokenizer is {args.tokenizer}, and there is no file {definition}")
    try:
        tokenizer = Tokenizer.from_file(str(definition))
    except Exception as error:  # the library raises nothing more special
        raise SetupError(f"{definition} is no tokenizer: {error}") from error
    report = _Report()
    try:
        summary = build_table(
            args.paths,
            tokenizer,
            args.output,
            order=args.order,
            max_bytes=args.max_bytes,
            min_count=args.min_count,
            suffixes=args.suffix,
            collections=args.from_collection,
            progress=report,
        )
    except (ValueError, OSError) as error:
        raise SetupError(str(error)) from error
    finally:
        report.end()
    if args.json:
        print(json.dumps(asdict(summary) | {"seconds": report.seconds}))
    else:
        print(_describe(summary, report.seconds))
    return 0


def parse_bytes(text: str) -> int:
    """Reads a size such as 4096, 16M or 1G (powers of 1024).

    >>> parse_bytes("16M")
    16777216
    """
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write a number of bytes, or one with K, M or G"
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def time_left(done: int, total: int, elapsed: float) -> str:
    """What remains of some work, for a person, at the speed so far.

    >>> time_left(25, 100, 10.0)
    'about 30 s left'
    """
    if not done:
        return "time left unknown"
    seconds = max(0.0, elapsed * (total - done) / done)
    return f"about {seconds / 60:.0f} min left" if seconds >= 120 else f"about {seconds:.0f} s left"


class _Report:
    """Progress on standard error: one line that is rewritten on a terminal, a line now and then elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._shown = -1e9
        self._is_terminal = sys.stderr.isatty()
        self._has_line = False

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return round(self._clock() - self._begun, 3)

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._shown < (0.2 if self._is_terminal else 5.0):
            return
        self._shown = now
        rest = "pruning and writing" if done >= total else time_left(done, total, now - self._begun)
        line = f"build-ngram: {done / 1e6:.1f} of {total / 1e6:.1f} MB counted, {rest}"
        print(f"\r{line:<78}" if self._is_terminal else line, end="", file=sys.stderr, flush=True)
        self._has_line = True
        if not self._is_terminal:
            self.end()

    def end(self) -> None:
        """Leaves the progress line."""
        if self._has_line:
            print(file=sys.stderr, flush=True)
        self._has_line = False


def _describe(summary: "BuildSummary", seconds: float) -> str:
    lines = [
        f"{summary.path}: {summary.num_bytes} bytes, SHA-256 {summary.sha256}",
        f"  from {summary.num_files} files, {summary.num_text_bytes} bytes, {summary.num_tokens} tokens "
        f"in {seconds:.1f} s",
        f"  for {summary.vocabulary_size} token ids, tokenizer {summary.tokenizer_hash}",
    ]
    for length, (kept, counted, discounting) in enumerate(
        zip(summary.num_kept, summary.num_counted, summary.discounting, strict=True), start=1
    ):
        lines.append(f"  {length}-grams: {kept} of {counted} kept, {discounting} discounting")
    return "\n".join(lines)
