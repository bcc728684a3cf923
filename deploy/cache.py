"""Where prepared models and data live, and a manifest that knows whether they are whole."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Piece:
    """One file or folder of the cache.

    Attributes:
        name: Its name in the cache.
        made_from: Names everything it depends on; another text means that it must be made again.
        make: Makes it at the path it is given.
        title: What it is, for a person.
    """

    name: str
    made_from: str
    make: Callable[[Path], None]
    title: str


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps two processes from preparing the same cache at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure(folder: Path, piece: Piece, *, force: bool, report: Callable[[str], None]) -> bool:
    """Makes a piece of the cache unless it is there, whole and up to date.

    It is made beside its place and moved there when it is complete, so a broken run leaves no half of one.

    Args:
        folder: The cache, held by `locked`.
        piece: What to make.
        force: Make it in any case.
        report: Told what is done and why.

    Returns:
        Whether it was made.
    """
    place = folder / piece.name
    reason = "asked for anew" if force else _why_not_ready(folder, piece)
    if reason is None:
        report(f"{piece.title}: ready in {place}")
        return False
    report(f"{piece.title}: {reason}; preparing it")
    unfinished = folder / f".unfinished-{piece.name}"
    _remove(unfinished)
    try:
        piece.make(unfinished)
        files = _digests(unfinished)
        for name in files:
            # safetensors files are private to their writer, but a cache may be shared.
            (unfinished / name).chmod(0o644)
        _remove(place)
        unfinished.rename(place)
    finally:
        _remove(unfinished)
    _write_manifest(folder, _read_manifest(folder) | {piece.name: _Entry(piece.made_from, files)})
    report(f"{piece.title}: ready in {place}")
    return True


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the manifest knows of a piece: `files` maps paths inside it to their SHA-256."""

    made_from: str
    files: dict[str, str]


def _why_not_ready(folder: Path, piece: Piece) -> str | None:
    place = folder / piece.name
    entry = _read_manifest(folder).get(piece.name)
    if entry is None or not place.exists():
        return "not there yet"
    if entry.made_from != piece.made_from:
        return "made from something else than is wanted now"
    for name, expected in entry.files.items():
        path = place / name
        if not path.is_file():
            return f"{path} is missing"
        if digest(path) != expected:
            return f"{path} is damaged"
    return None


def _digests(place: Path) -> dict[str, str]:
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): digest(path) for path in files}


def _read_manifest(folder: Path) -> dict[str, _Entry]:
    try:
        content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return {name: _Entry(entry["made_from"], entry["files"]) for name, entry in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Without a readable manifest nothing is known to be whole; everything is made again.
        return {}


def _write_manifest(folder: Path, manifest: dict[str, _Entry]) -> None:
    content = {name: {"made_from": entry.made_from, "files": entry.files} for name, entry in manifest.items()}
    unfinished = folder / ".unfinished-manifest.json"
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(folder / "manifest.json")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
