"""What has been measured so far, a line a record, so that a run that was cut short goes on where it stopped.

It does not know what the records mean.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from deploy.errors import SetupError

FILE = "records.jsonl"

Key = tuple[str | int, ...]


class Records:
    """Records by key, kept in a file or, without a folder, in memory. Used as a context manager.

    The first line of the file holds the settings of the run; another run may go on with it only if its
    settings are the same. A key that is recorded again replaces what was there.

    Args:
        folder: Where to keep `records.jsonl`; made if need be. None for memory alone.
        settings: Everything that the figures depend on, as plain data.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        # As the file gives it back: tuples are lists there.
        self._settings = json.loads(json.dumps(settings))
        self._entries: dict[Key, dict[str, Any]] = {}
        self._folder = folder
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Records":
        """Opens the file.

        Raises:
            SetupError: It cannot be used, is damaged, in use, or belongs to a run with other settings.
        """
        if self._folder is None:
            return self
        path = self._folder / FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise SetupError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._open(path, self._file)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> dict[str, Any] | None:
        """The record of a key."""
        return self._entries.get(key)

    def of(self, kind: str) -> dict[Key, dict[str, Any]]:
        """The records whose key begins with `kind`, by the rest of their key, oldest first."""
        return {key[1:]: entry for key, entry in self._entries.items() if key[0] == kind}

    def add(self, key: Key, entry: Mapping[str, Any]) -> None:
        """Keeps a record; it is on disk when this returns."""
        # Behind all others: a record made again is the newest.
        self._entries.pop(key, None)
        self._entries[key] = json.loads(json.dumps(entry))
        self._write({"key": key, **entry})

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(content).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _open(self, path: Path, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(f"{path} is in use by another run") from None
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            # A run that was killed while it wrote: only whole lines count.
            file.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            self._write({"settings": self._settings})
            return
        entries = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
        settings = entries[0].get("settings")
        if not isinstance(settings, dict):
            raise SetupError(f"{path}, line 1 has no settings; it is not a file of this program")
        self._compare(path, settings)
        for number, entry in enumerate(entries[1:], start=2):
            key = entry.pop("key", None)
            if not isinstance(key, list) or not key:
                raise SetupError(f"{path}, line {number} has no key; name another folder with --out")
            self._entries.pop(tuple(key), None)
            self._entries[tuple(key)] = entry

    def _compare(self, path: Path, found: Mapping[str, Any]) -> None:
        names = sorted(
            name
            for name in {*found, *self._settings}
            if found.get(name, _ABSENT) != self._settings.get(name, _ABSENT)
        )
        if names:
            differences = "; ".join(
                f"{name} was {_short(found.get(name))} and is {_short(self._settings.get(name))}"
                for name in names
            )
            raise SetupError(
                f"{path} was made with other settings ({differences}); "
                "name another folder with --out, or repeat the command with the same settings"
            )


_ABSENT = object()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise SetupError(f"{path}, line {number} is damaged; name another folder with --out")
    return entry
