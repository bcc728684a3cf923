"""The results of generating: speed of each way, against each other way, and against the machine's limit.

What has been counted of a way's drafts, which is more than what was timed, stands in the same object.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from deploy.bench.entries import Entries, column, having, median, ratio_summary, summary, work_of
from deploy.bench.plan import own_ways, peer_ways
from deploy.bench.records import Records
from deploy.bench.roofline import Machine, Work, minimal_seconds
from deploy.bench.settings import Settings
from deploy.bench.speculation_results import speculation_result

SPEEDS = ("tokens_per_s", "end_to_end_tokens_per_s")
"""Of decoding alone, prefill and first token left out; and of everything from the request to the end."""


def generate_results(settings: Settings, records: Records, machine: Machine | None) -> list[dict[str, Any]]:
    """One object for each sampling and way that has been measured.

    Where the part "speculation" was run, counts and `records` are its own; the timed ones are in
    `timed_records` then. Where the part "generate" was not, there are no speeds.
    """
    ways = [*own_ways(settings), *peer_ways(settings)]
    found = []
    for sampling in settings.samplings:
        samples = {way.name: having(records.of("generate"), way.name, sampling) for way in ways}
        samples = {name: entries for name, entries in samples.items() if entries}
        for way in ways:
            counted = speculation_result(settings, records, way, sampling)
            if way.name not in samples and not counted:
                continue
            description = records.get(("way", way.name)) or {}
            parts = ("mode", "variant", "weight_format", "kernel", "software", "num_threads")
            result = _result(way.name, samples, work_of(description), machine)
            if counted:
                result["timed_records"] = result["records"]
            found.append(
                {"sampling": sampling} | {part: description[part] for part in parts} | result | counted
            )
    return found


def _result(
    name: str, samples: Mapping[str, Entries], work: Work | None, machine: Machine | None
) -> dict[str, Any]:
    """What one way did, `samples` being those of all ways with the same sampling."""
    own = samples.get(name, {})
    result: dict[str, Any] = {
        "num_prompts": len({key[0] for key in own}),
        "num_tokens": sum(entry["num_tokens"] for entry in own.values()),
    }
    for figure in (*SPEEDS, "first_token_s"):
        found = summary(column(own, figure).values())
        result[figure] = median(found)
        result[f"{figure}_spread"] = found
    result["share_of_limit"] = summary(_share_of_limit(entry, work, machine) for entry in own.values())
    result["ratios"] = {
        other: {speed: ratio_summary(column(own, speed), column(entries, speed)) for speed in SPEEDS}
        for other, entries in samples.items()
        if other != name
    }
    first, reference = next(iter(samples.items()), (name, own))
    pairs = [(entry, reference[key]) for key, entry in own.items() if key in reference]
    same = sum(entry["token_ids"] == other["token_ids"] for entry, other in pairs)
    result["same_tokens"] = {"as": first, "same": same, "of": len(pairs)}
    result |= _speculation(own.values())
    result["records"] = [{"prompt": key[0], "round": key[1], **entry} for key, entry in own.items()]
    return result


def _share_of_limit(entry: Mapping[str, Any], work: Work | None, machine: Machine | None) -> float | None:
    """How near decoding came to the machine's limit: 1 is as fast as memory and arithmetic allow."""
    if work is None or machine is None or entry["tokens_per_s"] is None:
        return None
    context = entry["num_prompt_tokens"] + entry["num_tokens"] / 2
    return minimal_seconds(work, machine, num_rows=1, context=context) * float(entry["tokens_per_s"])


def _speculation(entries: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """What drafts came to, over all generations; nothing for a peer."""
    entries = list(entries)
    if not entries or "num_steps" not in entries[0]:
        return {}
    names = ("num_tokens", "num_steps", "num_drafted", "num_accepted", "num_draft_passes")
    total = {name: sum(entry[name] for entry in entries) for name in names}
    return {
        "acceptance_length": total["num_tokens"] / total["num_steps"],
        "acceptance_rate": total["num_accepted"] / total["num_drafted"] if total["num_drafted"] else None,
        "draft_passes_per_step": total["num_draft_passes"] / total["num_steps"],
    }
