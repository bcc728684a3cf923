"""Reading records: parts of them by key, and values summed up as plain data."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from deploy.bench.records import Key
from deploy.bench.roofline import Work
from deploy.bench.statistics import pair_ratios, spread

Entries = Mapping[Key, Mapping[str, Any]]
Values = Mapping[Key, float | None]


def having(entries: Entries, *head: str | int) -> Entries:
    """The entries whose key begins so, by the rest of it."""
    return {key[len(head) :]: entry for key, entry in entries.items() if key[: len(head)] == head}


def column(entries: Entries, name: str) -> Values:
    """One value of each entry."""
    return {key: entry[name] for key, entry in entries.items()}


def summary(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Median and spread as plain data, absent values left out; None if there are none."""
    found = spread([value for value in values if value is not None])
    return None if found is None else asdict(found)


def ratio_summary(values: Values, baseline: Values) -> dict[str, Any] | None:
    """Median and spread of the ratios of pairs."""
    return summary(pair_ratios(values, baseline))


def median(found: Mapping[str, Any] | None) -> float | None:
    """The median of a summary."""
    return None if found is None else found["median"]


def work_of(description: Mapping[str, Any]) -> Work | None:
    """What a pass of a way has to do, as its record has it."""
    work = description["work"]
    return None if work is None else Work(**work)
