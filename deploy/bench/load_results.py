"""The results of prefilling long prompts and of serving several sessions at once."""

from typing import Any

from deploy.bench.entries import column, having, median, ratio_summary, summary, work_of
from deploy.bench.plan import own_ways, peer_ways, plain_ways
from deploy.bench.records import Records
from deploy.bench.roofline import Machine, minimal_seconds
from deploy.bench.settings import Settings

THROUGHPUTS = ("tokens_per_s", "steady_tokens_per_s")
"""From the first request to the last token; and while all sessions were decoding."""


def prefill_results(settings: Settings, records: Records, machine: Machine | None) -> list[dict[str, Any]]:
    """One object for each prompt length and way that has been measured."""
    found = []
    names = [way.name for way in (*plain_ways(settings), *peer_ways(settings))]
    for length in settings.prompt_lengths:
        entries = {name: having(records.of("prefill"), name, length) for name in names}
        speeds = {
            name: {key: length / entry["seconds"] for key, entry in each.items()}
            for name, each in entries.items()
            if each
        }
        for name, values in speeds.items():
            description = records.get(("way", name)) or {}
            work = work_of(description)
            speed = summary(values.values())
            share = None
            if work is not None and machine is not None and speed is not None:
                # A token attends to half of the prompt on average; the head is needed for the last one alone,
                # so the limit, which counts it for all, is drawn a little too low.
                limit = length / minimal_seconds(work, machine, num_rows=length, context=length / 2)
                share = speed["median"] / limit
            found.append(
                {
                    "mode": description["mode"],
                    "variant": description["variant"],
                    "weight_format": description["weight_format"],
                    "length": length,
                    "tokens_per_s": median(speed),
                    "tokens_per_s_spread": speed,
                    "share_of_limit": share,
                    "ratios": {
                        other: ratio_summary(values, partners)
                        for other, partners in speeds.items()
                        if other != name
                    },
                }
            )
    return found


def session_results(settings: Settings, records: Records, machine: Machine | None) -> list[dict[str, Any]]:
    """One object for each sampling, way and number of sessions that has been measured."""
    found = []
    for sampling in settings.samplings:
        for way in own_ways(settings):
            description = records.get(("way", way.name))
            entries = having(records.of("sessions"), way.name, sampling)
            if description is None:
                continue
            work, alone = work_of(description), having(entries, settings.session_counts[0])
            for count in settings.session_counts:
                each = having(entries, count)
                if not each:
                    continue
                result: dict[str, Any] = {
                    "sampling": sampling,
                    "mode": way.mode,
                    "variant": way.variant,
                    "weight_format": description["weight_format"],
                    "sessions": count,
                    "compared_with": settings.session_counts[0],
                }
                for figure in THROUGHPUTS:
                    values = column(each, figure)
                    result[figure] = median(summary(values.values()))
                    result[f"{figure}_spread"] = summary(values.values())
                    result[f"{figure}_ratio"] = ratio_summary(values, column(alone, figure))
                steady, share = result["steady_tokens_per_s"], None
                if work is not None and machine is not None and steady is not None:
                    lengths = [entry["num_prompt_tokens"] for entry in each.values()]
                    context = sum(lengths) / len(lengths) + settings.max_tokens / 2
                    step = minimal_seconds(work, machine, num_rows=count, context=context, num_sessions=count)
                    share = steady / (count / step)
                found.append(result | {"share_of_limit": share})
    return found
