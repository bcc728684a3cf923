"""The GGUF files that llama.cpp runs: the bundled target's own, and rewritten ones, kept in the cache."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploy.bench.child import ask_once
from deploy.cache import Piece, digest, ensure, locked
from deploy.errors import SetupError
from deploy.fetch import SMOLLM2, TARGET, download
from services.cache import cache_folder

ABSENT = "llama-cpp-python is not installed; `pip install -e '.[bench-peers]'` in the checkout compiles it"

Report = Callable[[str], None]


def gguf_file(weight_format: str | None, model: str, given: Path | None, report: Report) -> Path:
    """The file that holds a model in a number format, made if need be.

    Args:
        weight_format: "float32" or "float16"; None for the format of the original.
        model: The target.
        given: The original; None for the bundled target's.
        report: Told what is done, a line at a time.

    Raises:
        SetupError: llama-cpp-python is not installed, there is no original, or it cannot be had or rewritten.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise SetupError(ABSENT)
    folder = cache_folder()
    if given is None and Path(model) != folder / TARGET:
        raise SetupError(f"no GGUF file of {model} is known; name one with --gguf")
    if given is not None and not given.is_file():
        raise SetupError(f"--gguf {given} does not exist")
    with locked(folder):
        name, source = TARGET, SMOLLM2.sha256
        if given is None:
            original = folder / f"{TARGET}.q4_1.gguf"
            piece = Piece(original.name, source, partial(_make_original, report), "GGUF file of the target")
            ensure(folder, piece, force=False, report=report)
        else:
            original, source = given, digest(given)
            name = f"gguf-{source[:16]}"
        if weight_format is None:
            return original
        rewritten = folder / f"{name}.{weight_format}.gguf"
        make = partial(_rewrite, original, weight_format)
        piece = Piece(rewritten.name, f"{source} as {weight_format}", make, f"GGUF file in {weight_format}")
        ensure(folder, piece, force=False, report=report)
        return rewritten


def _make_original(report: Report, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(download(SMOLLM2, Path(folder), report), output)


def _rewrite(original: Path, weight_format: str, output: Path) -> None:
    arguments = {"source": str(original), "output": str(output), "weight_format": weight_format}
    ask_once("gguf_worker", "rewrite", arguments)
