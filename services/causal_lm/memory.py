"""How much memory a device has: for the CPU the machine's, or the control group's where that is less."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device, in bytes.

    Attributes:
        total: All there is.
        available: What can still be taken.
    """

    total: int
    available: int


def memory_of(device: str, root: Path = Path("/")) -> Memory | None:
    """The memory of a torch device; None if it does not tell.

    Args:
        device: Such as "cpu" or "cuda:0".
        root: Where /proc and /sys are.
    """
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    if device != "cpu":
        return None
    try:
        fields = _fields(root / "proc/meminfo")
        found = [Memory(fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024)]
    except (OSError, KeyError, ValueError):
        return None
    found += _limits(root)
    return Memory(min(memory.total for memory in found), min(memory.available for memory in found))


def gibibytes(num_bytes: int) -> str:
    """A number of bytes for a person.

    >>> gibibytes(3 * 1024**3 // 2)
    '1.50 GiB'
    """
    return f"{num_bytes / _GIB:.2f} GiB"


def _limits(root: Path) -> Iterator[Memory]:
    """The limits of the control groups this process is in, from the innermost one out."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        # Within a container the path is the host's and not there; its own group is then the mount itself.
        inner = Path(os.path.normpath(f"/{path}").lstrip("/"))
        for group in (inner, *inner.parents):
            memory = _read_group(mount / group, limit, usage)
            if memory is not None:
                yield memory


def _read_group(folder: Path, limit: str, usage: str) -> Memory | None:
    try:
        most = int((folder / limit).read_text())  # "max" is no number
        used = int((folder / usage).read_text())
        statistics = _fields(folder / "memory.stat")
    except (OSError, ValueError):
        return None
    # File pages that nobody has used lately go first when memory is short.
    spare = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return Memory(most, max(0, most - used + spare))


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, perhaps with a unit."""
    pairs = (line.split()[:2] for line in path.read_text().splitlines())
    return {name: int(value) for name, value in pairs}
