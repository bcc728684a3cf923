"""Counts of n-grams of token ids as a trie in flat arrays, and how two of them are added up.

It does not know where the tokens come from or what probabilities are made of the counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

TOKEN_BITS = 21
MAX_VOCABULARY_SIZE = 1 << TOKEN_BITS
SEPARATOR = -1
"""Stands between two texts in a stream of tokens; no n-gram holds it."""

_TOKEN_MASK = np.uint64(MAX_VOCABULARY_SIZE - 1)
_SHIFT = np.uint64(TOKEN_BITS)


@dataclass(frozen=True, slots=True)
class NgramCounts:
    """How often each n-gram occurs, for lengths 1 to `order`.

    Attributes:
        keys: For each length n the n-grams in rising order; an n-gram's index is its place here. The key
            packs the index of its first n - 1 tokens (0 for n = 1) above its last token. [order] of
            [num_ngrams]
        counts: Occurrences of each. [order] of [num_ngrams]
    """

    keys: tuple[Keys, ...]
    counts: tuple[Counts, ...]

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.keys)

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        return len(self.keys)

    def prefixes(self, length: int) -> Counts:
        """Index of the first `length` - 1 tokens of each n-gram of this length, [num_ngrams]."""
        return (self.keys[length - 1] >> _SHIFT).astype(np.int64)

    def last_tokens(self, length: int) -> Counts:
        """Last token of each n-gram of this length, [num_ngrams]."""
        return (self.keys[length - 1] & _TOKEN_MASK).astype(np.int64)

    def suffixes(self) -> list[Counts]:
        """For each length n, the index of each n-gram's last n - 1 tokens among those of length n - 1.

        The suffix of every n-gram must be counted too.
        """
        found = [np.zeros(len(self.keys[0]), dtype=np.int64)]
        for length in range(2, self.order + 1):
            key = pack(found[-1][self.prefixes(length)], self.last_tokens(length))
            found.append(np.searchsorted(self.keys[length - 2], key))
        return found

    def select(self, kept: Sequence[Mask]) -> "NgramCounts":
        """The n-grams of these masks alone; the first tokens of a kept n-gram must be kept too."""
        keys, new_index = [], np.zeros(1, dtype=np.int64)
        for length, mask in enumerate(kept, start=1):
            keys.append(pack(new_index[self.prefixes(length)[mask]], self.last_tokens(length)[mask]))
            new_index = np.cumsum(mask) - 1
        return NgramCounts(
            tuple(keys), tuple(counts[mask] for counts, mask in zip(self.counts, kept, strict=True))
        )


def pack(prefixes: Counts, tokens: Counts) -> Keys:
    """Keys of the n-grams that continue `prefixes` (indices) with `tokens`."""
    return (prefixes.astype(np.uint64) << _SHIFT) | tokens.astype(np.uint64)


def count_ngrams(stream: Counts, order: int, num_carried: int = 0) -> NgramCounts:
    """Counts the n-grams of a stream of tokens.

    >>> counted = count_ngrams(np.array([7, 8, 7, 8]), order=2)
    >>> counted.last_tokens(2).tolist(), counted.counts[1].tolist()
    ([8, 7], [2, 1])

    Args:
        stream: Token ids below `MAX_VOCABULARY_SIZE`, and `SEPARATOR` between texts. [num_tokens]
        order: Length of the longest n-grams.
        num_carried: Tokens at the beginning that an earlier call has counted: n-grams that end in them get no
            count here.

    Returns:
        The counts. N-grams that begin among carried tokens may be listed with a count of 0.
    """
    levels: list[tuple[Keys, Counts]] = []
    index = np.where(stream == SEPARATOR, -1, 0)  # of the first n - 1 tokens at each position; -1 for none
    for length in range(1, order + 1):
        last = stream[length - 1 :]
        index = index[: len(last)]
        whole = np.flatnonzero((index >= 0) & (last != SEPARATOR))
        keys, place = np.unique(pack(index[whole], last[whole]), return_inverse=True)
        is_new = whole + length - 1 >= num_carried
        levels.append((keys, np.bincount(place[is_new], minlength=len(keys))))
        index = np.full(len(last), -1)
        index[whole] = place
    return NgramCounts(*map(tuple, zip(*levels, strict=True)))


def add(ours: NgramCounts, theirs: NgramCounts) -> NgramCounts:
    """The sum of two counts of the same order."""
    levels: list[tuple[Keys, Counts]] = []
    our_index = their_index = np.zeros(1, dtype=np.int64)  # of each n-gram of the last length in the sum
    for length in range(1, ours.order + 1):
        sides = (
            pack(our_index[ours.prefixes(length)], ours.last_tokens(length)),
            pack(their_index[theirs.prefixes(length)], theirs.last_tokens(length)),
        )
        keys, place = np.unique(np.concatenate(sides), return_inverse=True)
        our_index, their_index = np.split(place, [len(sides[0])])
        counts = np.zeros(len(keys), dtype=np.int64)
        counts[our_index] += ours.counts[length - 1]  # no key occurs twice on one side
        counts[their_index] += theirs.counts[length - 1]
        levels.append((keys, counts))
    return NgramCounts(*map(tuple, zip(*levels, strict=True)))
