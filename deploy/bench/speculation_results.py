"""The results of counting: what drafts bring for each sampling, mode and size of the drafts.

Figures are pooled: sums over all prompts, divided by each other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from deploy.bench.entries import Entries, having
from deploy.bench.plan import draft_sizes
from deploy.bench.records import Records
from deploy.bench.settings import PLAIN, Settings
from deploy.bench.traffic import PassSize, relative_traffic
from deploy.bench.ways import Way

_SUMS = (
    *("num_tokens", "num_steps", "num_drafted", "num_accepted"),
    *("num_draft_passes", "num_levels", "num_skipped_steps"),
)


def speculation_result(settings: Settings, records: Records, way: Way, sampling: str) -> dict[str, Any]:
    """What drafts brought to one way: the figures at the configured size, and in `budgets` at the others.

    Returns:
        `acceptance_length`, `acceptance_rate`, `relative_traffic`, passes of draft models a step, `rates` by
        depth and rank, shares of the tokens by `origins`, and the `records` of the prompts behind them; those
        of the other sizes are on disk only. Empty if nothing has been counted at the configured size.
    """
    counted = records.of("speculation")
    plain = having(counted, Way(PLAIN, way.variant).name, sampling, 0)
    sizes = {name: PassSize(**size) for name, size in (records.get(("sizes", way.variant)) or {}).items()}
    by_size = {
        max_nodes: entries
        for max_nodes in draft_sizes(settings, way.mode)
        if (entries := having(counted, way.name, sampling, max_nodes))
    }
    configured = by_size.get(draft_sizes(settings, way.mode)[0])
    if configured is None:
        return {}
    found = {
        max_nodes: _figures(entries, sizes) | {"same_tokens": _same_tokens(entries, plain, way)}
        for max_nodes, entries in by_size.items()
    }
    return {
        **found[draft_sizes(settings, way.mode)[0]],
        "budgets": [found[budget] for budget in settings.budgets if budget in found],
        "records": [{"prompt": key[0], **entry} for key, entry in sorted(configured.items())],
    }


def _figures(entries: Entries, sizes: Mapping[str, PassSize]) -> dict[str, Any]:
    total = {name: sum(entry[name] for entry in entries.values()) for name in _SUMS}
    return {
        "num_prompts": len(entries),
        **{name: total[name] for name in ("num_tokens", "num_steps", "num_skipped_steps")},
        "max_nodes": next(iter(entries.values()))["max_nodes"],
        "acceptance_length": total["num_tokens"] / total["num_steps"],
        "acceptance_rate": total["num_accepted"] / total["num_drafted"] if total["num_drafted"] else None,
        "relative_traffic": relative_traffic(entries.values(), sizes),
        "draft_passes_per_step": total["num_draft_passes"] / total["num_steps"],
        "level_passes_per_step": total["num_levels"] / total["num_steps"],
        "rates": _rates(entries.values()),
        "origins": _origins(entries.values()),
    }


def _rates(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How often a node was right, once the target had come to its parent."""
    reached: Counter[tuple[str, int, int]] = Counter()
    accepted: Counter[tuple[str, int, int]] = Counter()
    for entry in entries:
        for drafter, depth, rank, num_reached, num_accepted in entry["ranks"]:
            reached[drafter, depth, rank] += num_reached
            accepted[drafter, depth, rank] += num_accepted
    return [
        {
            **dict(zip(("drafter", "depth", "rank"), place, strict=True)),
            "num_reached": count,
            "num_accepted": accepted[place],
            "rate": accepted[place] / count,
        }
        for place, count in sorted(reached.items())
    ]


def _origins(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the committed tokens by who proposed them."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts.update(entry["origins"])
    return {name: counts[name] / counts.total() for name in sorted(counts)}


def _same_tokens(entries: Entries, plain: Entries, way: Way) -> dict[str, Any]:
    pairs = [(entry, plain[key]) for key, entry in entries.items() if key in plain]
    same = sum(entry["token_ids"] == other["token_ids"] for entry, other in pairs)
    return {"as": Way(PLAIN, way.variant).name, "same": same, "of": len(pairs)}
