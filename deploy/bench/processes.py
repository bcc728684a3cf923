"""What the operating system says about running processes: peak memory and processor time."""

import os
from pathlib import Path


def peak_memory(process_id: int) -> int | None:
    """Most bytes that a process has held in memory so far; None if it is not here."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return None


def processor_seconds(process_id: int) -> float:
    """Processor time that a process has used so far, all its threads together; 0 if it is not here."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Processor time that all processes of the machine have used so far; 0 where that is not known."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    # user, nice, system; then idle and waiting, interrupts, soft interrupts, stolen.
    used = [int(fields[index]) for index in (0, 1, 2, 5, 6, 7)]
    return sum(used) / os.sysconf("SC_CLK_TCK")


def processor_name() -> str:
    """The processor's own name, or an empty text."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
