"""Python sources to learn from: those of a folder or of the standard library, without their tests."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"})


def python_files(folder: Path) -> Iterator[Path]:
    """The Python files in a folder, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path
