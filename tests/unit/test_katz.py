"""Counts and Katz probabilities against dictionaries and fractions, read back through the table's file."""

import itertools
import random
from collections import Counter
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ngram.builder import prune
from services.ngram.counts import SEPARATOR, NgramCounts, add, count_ngrams
from services.ngram.katz import MAX_DISCOUNTED, fit
from services.ngram.layout import arrays_of
from services.ngram.table import NgramTable, store

Text = list[int]
texts_of = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4).filter(any)


class Oracle:
    """Katz back-off with dictionaries and exact fractions, straight from the definition."""

    def __init__(
        self, texts: list[Text], order: int, vocabulary_size: int, kept: set[tuple[int, ...]]
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.counts = {n: count_tuples(texts, n) for n in range(1, order + 1)}
        self.kept = kept
        self.probability = lru_cache(maxsize=None)(self._probability)
        self._good_turing = {n: good_turing(counts) for n, counts in self.counts.items()}
        self._absolute = {n: absolute(counts) for n, counts in self.counts.items()}

    def seen(self, context: tuple[int, ...]) -> dict[int, int]:
        counts = self.counts[len(context) + 1]
        ngrams = [(*context, token) for token in range(self.vocabulary_size)]
        return {ngram[-1]: counts[ngram] for ngram in ngrams if ngram in self.kept}

    def _probability(self, context: tuple[int, ...], token: int) -> Fraction:
        seen = self.seen(context)
        if not seen:
            return self.shorter(context, token)
        shares = self.shares(context, seen)
        if token in shares:
            return shares[token]
        unseen = 1 - sum(self.shorter(context, other) for other in seen)
        return (1 - sum(shares.values())) / unseen * self.shorter(context, token)

    def shorter(self, context: tuple[int, ...], token: int) -> Fraction:
        return self.probability(context[1:], token) if context else Fraction(1, self.vocabulary_size)

    def shares(self, context: tuple[int, ...], seen: dict[int, int]) -> dict[int, Fraction]:
        length = len(context) + 1
        total = sum(c for ngram, c in self.counts[length].items() if ngram[:-1] == context)
        ratios = self._good_turing[length]
        if len(seen) == self.vocabulary_size:
            return {token: Fraction(count, total) for token, count in seen.items()}
        if ratios and min(seen.values()) <= MAX_DISCOUNTED:
            return {token: count * ratios.get(count, Fraction(1)) / total for token, count in seen.items()}
        return {token: (count - self._absolute[length]) / total for token, count in seen.items()}


def count_tuples(texts: list[Text], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1))


def good_turing(counts: Counter[tuple[int, ...]]) -> dict[int, Fraction]:
    k, n = MAX_DISCOUNTED, Counter(counts.values())
    if not all(n[r] for r in range(1, k + 2)):
        return {}
    a = Fraction((k + 1) * n[k + 1], n[1])
    if a >= 1:
        return {}
    ratios = {r: (Fraction((r + 1) * n[r + 1], r * n[r]) - a) / (1 - a) for r in range(1, k + 1)}
    kept = [r * ratios[r] for r in ratios] + [Fraction(k + 1)]
    sound = all(0 < ratio < 1 for ratio in ratios.values()) and all(
        x < y for x, y in itertools.pairwise(kept)
    )
    return ratios if sound else {}


def absolute(counts: Counter[tuple[int, ...]]) -> Fraction:
    n = Counter(counts.values())
    return Fraction(n[1], n[1] + 2 * n[2]) if n[1] and n[2] else Fraction(1, 2)


def stream_of(texts: list[Text]) -> np.ndarray:
    return np.array([token for text in texts for token in [SEPARATOR, *text]], dtype=np.int64)


def as_tuples(ngrams: NgramCounts) -> list[dict[tuple[int, ...], int]]:
    """The n-grams of each length as tuples, with their counts."""
    levels: list[list[tuple[int, ...]]] = [[()]]
    for n in range(1, ngrams.order + 1):
        ends = zip(ngrams.prefixes(n).tolist(), ngrams.last_tokens(n).tolist(), strict=True)
        levels.append([(*levels[-1][prefix], token) for prefix, token in ends])
    pairs = zip(levels[1:], ngrams.counts, strict=True)
    return [dict(zip(level, counts.tolist(), strict=True)) for level, counts in pairs]


@given(texts=texts_of, cuts=st.lists(st.integers(0, 50), max_size=4), order=st.integers(2, 5))
def test_chunks_add_up_to_what_a_dictionary_counts(texts, cuts, order):
    stream = stream_of(texts)
    borders = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    total, carried = None, stream[:0]
    for begin, end in itertools.pairwise(borders):
        chunk = np.concatenate([carried, stream[begin:end]])
        counted = count_ngrams(chunk, order, len(carried))
        total = counted if total is None else add(total, counted)
        carried = chunk[1 - order :]

    assert as_tuples(total) == [count_tuples(texts, n) for n in range(1, order + 1)]


def check_against_oracle(texts, order, vocabulary_size, kept_masks, counted, contexts, path):
    model = fit(counted, kept_masks, vocabulary_size)
    store(path, model, "hash")
    table = NgramTable(path)
    kept = {ngram for level in as_tuples(model.ngrams) for ngram in level}
    oracle = Oracle(texts, order, vocabulary_size, kept)
    tokens = np.arange(vocabulary_size)
    for context in contexts:
        expected = [oracle.probability(context, token) for token in range(vocabulary_size)]
        assert sum(expected) == 1
        assert min(expected) > 0
        found = table.probabilities(table.find(context), tokens)
        np.testing.assert_allclose(found, np.array(expected, dtype=float), atol=1e-9, rtol=0)
        assert abs(found.sum() - 1.0) < 1e-6


@settings(deadline=None, max_examples=150)
@given(data=st.data(), texts=texts_of, order=st.integers(2, 4))
def test_probabilities_equal_the_oracle_in_every_context(tmp_path_factory, data, texts, order):
    counted = count_ngrams(stream_of(texts), order)
    vocabulary_size = data.draw(st.integers(4, 5))
    smallest = arrays_of([1] + [0] * (order - 1), [1] + [0] * (order - 1), vocabulary_size)[1]
    max_bytes = data.draw(st.none() | st.integers(smallest, smallest + 800))
    kept = prune(counted, vocabulary_size, max_bytes=max_bytes, min_count=data.draw(st.integers(1, 2)))
    contexts = [c for n in range(order) for c in itertools.product(range(vocabulary_size), repeat=n)]
    path = tmp_path_factory.mktemp("katz") / "table"

    check_against_oracle(texts, order, vocabulary_size, kept, counted, contexts, path)


@pytest.mark.parametrize("min_count", [1, 2, 7])
def test_good_turing_equals_the_oracle(tmp_path, min_count):
    # Words by a falling law, so that counts of counts fall too; 58 and 59 always go together, which gives a
    # context whose only count is above k.
    draw = random.Random(4)
    words = draw.choices(range(58), [1 / (1 + rank) for rank in range(58)], k=6000)
    texts = [[token for word in words for token in ([58, 59] if word == 3 else [word])]]
    counted = count_ngrams(stream_of(texts), 3)
    kept = prune(counted, 60, min_count=min_count)
    assert [bool(d.good_turing) for d in fit(counted, kept, 60).discounts] == [False, True, True]
    seen = sorted(as_tuples(counted)[1])
    contexts = [(), (58,), (0, 58), (59,), *draw.sample(seen, 40), (41, 58), (57, 57)]

    check_against_oracle(texts, 3, 60, kept, counted, contexts, tmp_path / "table")


def test_a_shorter_order_is_the_model_of_that_order(tmp_path):
    texts = [[0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1]]
    for order in (2, 3):
        counted = count_ngrams(stream_of(texts), order)
        store(tmp_path / f"{order}", fit(counted, prune(counted, 4), 4), "hash")
    short, cut = NgramTable(tmp_path / "2"), NgramTable(tmp_path / "3", order=2)
    for context in itertools.product(range(4), repeat=2):
        expected = short.probabilities(short.find(context), np.arange(4))
        np.testing.assert_array_equal(cut.probabilities(cut.find(context), np.arange(4)), expected)
