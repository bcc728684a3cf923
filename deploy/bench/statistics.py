"""Medians, spreads, and ratios taken pair by pair. It does not know what was measured."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """Some values, summed up.

    Attributes:
        median: Half of them are below.
        low: Lower quartile.
        high: Upper quartile.
        deviation: Median of the distances from the median.
        count: How many.
    """

    median: float
    low: float
    high: float
    deviation: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Sums up values; None if there are none."""
    if not values:
        return None
    median = statistics.median(values)
    low, high = (quantile(values, share) for share in (0.25, 0.75))
    deviation = statistics.median(abs(value - median) for value in values)
    return Spread(median, low, high, deviation, len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The value with `share` of the values below it, between neighbours by their distance."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def pair_ratios(values: Mapping[K, float | None], baseline: Mapping[K, float | None]) -> list[float]:
    """Ratios of values measured side by side.

    Args:
        values: By what they share with their partner, such as prompt and round; None where there is none.
        baseline: The partners.

    Returns:
        One ratio for each pair of which both sides are there.
    """
    ratios = []
    for key, value in values.items():
        partner = baseline.get(key)
        if value is not None and partner is not None and partner > 0:
            ratios.append(value / partner)
    return ratios
