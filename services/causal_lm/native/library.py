"""Compiles the C sources beside this file for the processor at hand, and loads the result.

The compiled library is kept in a cache folder under a name that its sources, flags and processor decide, so
that a machine compiles once (a few seconds) and never runs code made for another.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from services.cache import cache_folder

SOURCES = ("forward.c", "attention.h", "linear.h", "simd.h", "team.h")
# Contraction is off so that every fused multiply-add stands in the source: see simd.h.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
MARCH = {"x86_64": ("-march=native",), "AMD64": ("-march=native",), "aarch64": ("-mcpu=native",)}
COMPILE_TIMEOUT_S = 120

_log = logging.getLogger(__name__)


class NoLibraryError(RuntimeError):
    """There is no native library on this machine; the text says why."""


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """The library for this processor, or None if there can be none, which is said once."""
    try:
        return load(MARCH.get(platform.machine(), ()))
    except NoLibraryError as error:
        _log.warning("no native kernel: %s; running on torch's, which are slower", error)
        return None


def load(target_flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compiles the library, unless it is in the cache, and loads it.

    Args:
        target_flags: Compiler flags that choose the instruction set.

    Raises:
        NoLibraryError: There is no compiler, or it or the loader refuses.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None or shutil.which(compiler) is None:
        raise NoLibraryError(f"there is no C compiler ({compiler or 'gcc, cc'})")
    folder = cache_folder() / "native"
    path = folder / f"stagespec-{_digest(compiler, target_flags)}.so"
    if not path.exists():
        _compile([compiler, *FLAGS, *target_flags], path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"{path} cannot be loaded: {error}") from error
    library.stagespec_packed_bytes.restype = ctypes.c_int64
    return library


def _compile(command: list[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            # Compiled aside and moved, so that two processes that start together do not meet half a file.
            made = Path(folder) / path.name
            command = [*command, str(Path(__file__).with_name(SOURCES[0])), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
            made.replace(path)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise NoLibraryError(f"{command[0]} failed: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibraryError(f"{command[0]} cannot be run: {error}") from error


def _digest(compiler: str, target_flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, target_flags, _processor())).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What decides which instructions there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
