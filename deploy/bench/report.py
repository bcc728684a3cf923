"""What the records of a run come to, as one object of plain data.

It reads records alone, so that a run can be reported while it is unfinished, or again later.
"""

from typing import Any

from deploy.bench.forward_results import outside_linear, quality_results, verify_results
from deploy.bench.generate_results import generate_results
from deploy.bench.load_results import prefill_results, session_results
from deploy.bench.plan import all_units
from deploy.bench.records import Records
from deploy.bench.roofline import Machine
from deploy.bench.settings import Settings


def build_report(settings: Settings, num_prompts: int, records: Records) -> dict[str, Any]:
    """The whole report.

    Args:
        settings: What was to be measured.
        num_prompts: How many prompts there are.
        records: What has been.
    """
    skipped = {str(what): entry["reason"] for (what,), entry in records.of("skipped").items()}
    missing = [
        unit
        for unit in all_units(settings, num_prompts)
        if unit.key not in records and unit.subject not in skipped and unit.case not in skipped
    ]
    found = records.get(("machine",))
    machine = None if found is None else Machine(found["read_bytes_per_s"], found["flops"])
    return {
        "complete": not missing,
        "num_missing": len(missing),
        "settings": settings.plain(),
        "num_prompts": num_prompts,
        "machine": found,
        "idle": records.get(("idle",)),
        "pass_sizes": {str(label): sizes for (label,), sizes in records.of("sizes").items()},
        "results": generate_results(settings, records, machine),
        "prefill": prefill_results(settings, records, machine),
        "sessions": session_results(settings, records, machine),
        "verify": verify_results(settings, records, machine),
        "outside_linear": outside_linear(settings, records),
        "quality": quality_results(settings, records),
        "peak_bytes": _peak_bytes(records),
        "skipped": [{"what": what, "reason": reason} for what, reason in skipped.items()],
    }


def _peak_bytes(records: Records) -> dict[str, int]:
    """Most memory that each process took, in any of the parts that it served."""
    peaks: dict[str, int] = {}
    for part in ("generate", "prefill", "sessions"):
        for entry in records.of(part).values():
            for name, size in entry["peak_bytes"].items():
                peaks[name] = max(size, peaks.get(name, 0))
    return peaks
