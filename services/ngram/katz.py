"""Katz back-off: what the counts of n-grams say about the next token, as proper distributions.

    P(w | h) = (c(hw) - discount) / c(h)      if hw is kept and h was followed by anything,
               backoff(h) * P(w | h')         otherwise, h' being h without its first token,

down to the empty context, which backs off to the uniform distribution over the vocabulary. It does not know
how counts are gathered or stored. S. Katz, "Estimation of probabilities from sparse data", 1987.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from services.ngram.counts import Counts, Mask, NgramCounts

Floats = npt.NDArray[np.float64]

MAX_DISCOUNTED = 5
"""Katz's k: Good-Turing trusts counts above this as they are."""

NOTHING, GOOD_TURING, ABSOLUTE = 0, 1, 2
"""Ways to discount the continuations of a context: rows of `Discount.amounts`."""


@dataclass(frozen=True, slots=True)
class Discount:
    """What is taken from the counts of one length of n-grams.

    Attributes:
        good_turing: Share of a count r = 1..k that is kept; empty where the counts of counts don't allow it.
        absolute: Amount that absolute discounting takes from every count.
    """

    good_turing: tuple[float, ...]
    absolute: float

    def amounts(self) -> Floats:
        """What is taken from a count of r, by way of discounting and r up to k + 1, [3, k + 2]."""
        amounts = np.zeros((3, MAX_DISCOUNTED + 2))
        for count, ratio in enumerate(self.good_turing, start=1):
            amounts[GOOD_TURING, count] = count * (1.0 - ratio)
        amounts[ABSOLUTE] = self.absolute
        return amounts


def fit_discount(counts: Counts) -> Discount:
    """Discounts for n-grams of one length.

    Good-Turing with Katz's correction, r*/r = ((r+1) n[r+1] / (r n[r]) - A) / (1 - A) with
    A = (k+1) n[k+1] / n[1], if every n[1..k+1] is there, A < 1, all ratios are in (0, 1) and discounted
    counts still rise with the counts. The absolute amount is n[1] / (n[1] + 2 n[2]) (Ney, Essen and Kneser,
    1994), or 1/2 where one of them is 0.

    >>> fit_discount(np.array([1, 1, 2, 9])).absolute
    0.5

    Args:
        counts: How often each n-gram occurs, before any pruning. [num_ngrams]
    """
    n: list[int] = np.bincount(np.minimum(counts, MAX_DISCOUNTED + 2), minlength=MAX_DISCOUNTED + 3).tolist()
    absolute = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.5
    if not all(n[1 : MAX_DISCOUNTED + 2]):
        return Discount((), absolute)
    # In fractions, because rounding must not decide which discounting is used.
    excess = Fraction((MAX_DISCOUNTED + 1) * n[MAX_DISCOUNTED + 1], n[1])
    if excess >= 1:
        return Discount((), absolute)
    ratios = [
        (Fraction((r + 1) * n[r + 1], r * n[r]) - excess) / (1 - excess) for r in range(1, MAX_DISCOUNTED + 1)
    ]
    kept = [r * ratio for r, ratio in enumerate(ratios, start=1)]
    discounted = [Fraction(0), *kept, Fraction(MAX_DISCOUNTED + 1)]
    sound = all(ratio < 1 for ratio in ratios) and all(a < b for a, b in pairwise(discounted))
    return Discount(tuple(map(float, ratios)) if sound else (), absolute)


@dataclass(frozen=True, slots=True)
class KatzModel:
    """Everything that the probabilities are computed from.

    Attributes:
        ngrams: The n-grams that were kept.
        vocabulary_size: Number of token ids.
        discounts: For each length of n-grams. [order]
        totals: For each length n the occurrences of each context, by the index of its n - 1 tokens; those of
            pruned continuations count, so that their mass goes to the back-off. [order] of [num_contexts]
        ways: For each length n how the continuations of each context are discounted, by the same index: a row
            of `Discount.amounts`. [order] of [num_contexts]
        backoffs: For each length n the weight of the shorter context, by the same index. Of no meaning for
            contexts without continuations. [order] of [num_contexts]
    """

    ngrams: NgramCounts
    vocabulary_size: int
    discounts: tuple[Discount, ...]
    totals: tuple[Counts, ...]
    ways: tuple[Counts, ...]
    backoffs: tuple[Floats, ...]


def fit(counted: NgramCounts, kept: Sequence[Mask], vocabulary_size: int) -> KatzModel:
    """Computes discounts and back-off weights.

    Discounts come from all counts, as the rare n-grams that pruning takes are what Good-Turing learns from.

    Args:
        counted: The n-grams of the corpus.
        kept: Which of them to keep, for each length. If an n-gram is kept, so must be the n-grams without its
            last and without its first token.
        vocabulary_size: Number of token ids.
    """
    discounts = tuple(fit_discount(counts) for counts in counted.counts)
    ngrams = counted.select(kept)
    suffixes = ngrams.suffixes()
    totals, all_ways, backoffs = [], [], []
    shorter = np.empty(0)  # P(w | h) of each kept n-gram hw of the length before
    is_context = np.ones(1, dtype=np.bool_)  # which n-grams of the length before were kept
    for length, discount in enumerate(discounts, start=1):
        everything = _sum_by(counted.prefixes(length), counted.counts[length - 1], len(is_context))
        total = everything.astype(np.int64)[is_context]  # [num_contexts]
        prefixes, counts = ngrams.prefixes(length), ngrams.counts[length - 1]
        num_seen = np.bincount(prefixes, minlength=len(total))
        ways = _choose_ways(discount, prefixes, counts, num_seen, vocabulary_size)

        taken = discount.amounts()[ways[prefixes], np.minimum(counts, MAX_DISCOUNTED + 1)]
        probabilities = (counts - taken) / total[prefixes]
        # Summing what was taken, instead of 1 minus what is left, keeps small weights exact.
        pruned = total - _sum_by(prefixes, counts, len(total))
        leftover = (_sum_by(prefixes, taken, len(total)) + pruned) / np.maximum(total, 1)
        lower = shorter[suffixes[length - 1]] if length > 1 else np.full(len(counts), 1.0 / vocabulary_size)
        unseen = 1.0 - _sum_by(prefixes, lower, len(total))
        backs_off = (num_seen > 0) & (num_seen < vocabulary_size)
        backoffs.append(np.divide(leftover, unseen, out=np.zeros(len(total)), where=backs_off))
        totals.append(total)
        all_ways.append(ways)
        shorter, is_context = probabilities, kept[length - 1]
    return KatzModel(ngrams, vocabulary_size, discounts, tuple(totals), tuple(all_ways), tuple(backoffs))


def _choose_ways(
    discount: Discount, prefixes: Counts, counts: Counts, num_seen: Counts, vocabulary_size: int
) -> Counts:
    """How each context's continuations are discounted, [num_contexts].

    Good-Turing takes nothing from a context whose counts are all above k, and then the tokens it has not seen
    would have no mass: such contexts are discounted absolutely. A context that has seen the whole vocabulary
    has nothing to give its mass to.
    """
    has_rare = np.zeros(len(num_seen), dtype=np.bool_)
    has_rare[prefixes[counts <= MAX_DISCOUNTED]] = bool(discount.good_turing)
    return np.where(num_seen == vocabulary_size, NOTHING, np.where(has_rare, GOOD_TURING, ABSOLUTE))


def _sum_by(contexts: Counts, values: Counts | Floats, num_contexts: int) -> Floats:
    """Sums `values` by context, [num_contexts]."""
    return np.asarray(np.bincount(contexts, weights=values, minlength=num_contexts), dtype=np.float64)
