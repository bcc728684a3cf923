"""A Katz model in a memory-mapped, read-only file: stored once, then looked up.

Contexts are found by binary search: a context is the pair (context without its last token, last token),
packed into one number and sorted. The continuations of a context lie together, the most frequent first. It
does not know about sessions.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.ngram import layout
from services.ngram.counts import MAX_VOCABULARY_SIZE, TOKEN_BITS, Counts, pack
from services.ngram.katz import MAX_DISCOUNTED, Discount, Floats, KatzModel
from services.ngram.layout import Array, Header, TableError

ContextIds = list[tuple[int, int]]
"""The contexts that a table knows among the suffixes of a token sequence: (length n of their n-grams, id)."""


def store(path: Path, model: KatzModel, tokenizer_hash: str) -> str:
    """Writes a model to a file, atomically; returns the file's SHA-256 in hexadecimal."""
    ngrams, arrays = model.ngrams, dict[str, Array]()
    num_contexts = []
    context_ids = np.zeros(1, dtype=np.int64)  # of the n-grams of the length before that are contexts
    keys = np.zeros(1, dtype=np.uint64)  # of those n-grams, by the ids of their own prefixes
    for length in range(1, ngrams.order + 1):
        prefixes, tokens, counts = (
            ngrams.prefixes(length),
            ngrams.last_tokens(length),
            ngrams.counts[length - 1],
        )
        contexts, num_seen = np.unique(prefixes, return_counts=True)
        ranked = np.lexsort((tokens, -counts, prefixes))
        arrays |= {
            f"keys{length}": keys[contexts],
            f"backoffs{length}": model.backoffs[length - 1][contexts],
            f"totals{length}": model.totals[length - 1][contexts],
            f"ways{length}": model.ways[length - 1][contexts],
            f"begins{length}": np.concatenate([[0], np.cumsum(num_seen)]),
            f"counts{length}": counts[ranked],
            f"tokens{length}": tokens[ranked],
        }
        num_contexts.append(len(contexts))
        context_ids = np.zeros(len(model.totals[length - 1]), dtype=np.int64)
        context_ids[contexts] = np.arange(len(contexts))
        keys = pack(context_ids[prefixes], tokens)
    header = Header(
        vocabulary_size=model.vocabulary_size,
        tokenizer_hash=tokenizer_hash,
        num_contexts=tuple(num_contexts),
        num_ngrams=tuple(len(counts) for counts in ngrams.counts),
        good_turing=tuple(discount.good_turing for discount in model.discounts),
        absolute=tuple(discount.absolute for discount in model.discounts),
    )
    return layout.write(path, header, arrays)


class NgramTable:
    """Probabilities of next tokens from a table's file. One thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        order: int | None = None,
        tokenizer_hash: str | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        """Opens and checks a table.

        Args:
            path: The file.
            order: Length of the longest n-grams to use; None for the table's.
            tokenizer_hash: The tokenizer it must be made for; None for any.
            vocabulary_size: The number of token ids it must be made for; None for any.

        Raises:
            TableError: The file is damaged, or not made for this order, tokenizer or vocabulary.
        """
        header, arrays, self.num_bytes = layout.read(path)
        stored_order = len(header.num_ngrams)
        self.order = stored_order if order is None else order
        self.vocabulary_size = header.vocabulary_size
        self.tokenizer_hash = header.tokenizer_hash
        if self.order > stored_order:
            raise TableError(f"order is {order} and n-gram table {path} has order {stored_order}")
        if tokenizer_hash is not None and tokenizer_hash != header.tokenizer_hash:
            raise TableError(
                f"n-gram table {path} is made for the tokenizer with hash {header.tokenizer_hash}, "
                f"and this one has {tokenizer_hash}"
            )
        if vocabulary_size is not None and vocabulary_size != header.vocabulary_size:
            raise TableError(
                f"n-gram table {path} is made for {header.vocabulary_size} token ids, not {vocabulary_size}"
            )
        assert header.vocabulary_size <= MAX_VOCABULARY_SIZE
        self._levels = [
            _Level(arrays, length, Discount(header.good_turing[length - 1], header.absolute[length - 1]))
            for length in range(1, self.order + 1)
        ]
        self._slots = np.zeros(self.vocabulary_size, dtype=np.int32)  # all 0 between lookups
        uniform = np.full(self.vocabulary_size, 1.0 / self.vocabulary_size)
        self._unigrams = self._backed_off(uniform, np.arange(self.vocabulary_size), 1, 0)

    def find(self, suffix: Sequence[int]) -> ContextIds:
        """The contexts that continue `suffix`: its last 1, 2, .. tokens, as far as the table knows them."""
        found = []
        for num_tokens in range(1, min(self.order - 1, len(suffix)) + 1):
            context = 0
            for length, token_id in enumerate(suffix[-num_tokens:], start=2):
                context = self._levels[length - 1].find(context, token_id)
                if context < 0:
                    break
            else:
                found.append((num_tokens + 1, context))
        return found

    def leading(self, contexts: ContextIds, limit: int) -> list[Array]:
        """The `limit` most frequent continuations of each context, the empty context first."""
        return [
            self._levels[length - 1].tokens_of(context)[:limit] for length, context in [(1, 0), *contexts]
        ]

    def probabilities(self, contexts: ContextIds, token_ids: Counts) -> Floats:
        """Probability of each of some distinct tokens after a sequence whose contexts `find` found.

        Args:
            contexts: What `find` returned.
            token_ids: The tokens. [num_tokens]

        Returns:
            Their probabilities. [num_tokens]
        """
        probabilities = self._unigrams[token_ids]
        for length, context in contexts:
            probabilities = self._backed_off(probabilities, token_ids, length, context)
        return probabilities

    def _backed_off(self, shorter: Floats, token_ids: Counts, length: int, context: int) -> Floats:
        """Probabilities in a context, given those in the shorter one, [num_tokens]."""
        level = self._levels[length - 1]
        probabilities: Floats = shorter * level.backoffs[context]
        # A table of slots finds the few wanted tokens among many continuations in one pass over these.
        self._slots[token_ids] = np.arange(1, len(token_ids) + 1)
        slots = self._slots[level.tokens_of(context)]
        self._slots[token_ids] = 0
        hits = np.flatnonzero(slots)
        probabilities[slots[hits] - 1] = level.kept_share(context, hits)
        return probabilities


class _Level:
    """The contexts and continuations of one length of n-grams."""

    def __init__(self, arrays: dict[str, Array], length: int, discount: Discount) -> None:
        self.backoffs: Floats = arrays[f"backoffs{length}"]
        self._keys: npt.NDArray[np.uint64] = arrays[f"keys{length}"]
        self._totals, self._ways = arrays[f"totals{length}"], arrays[f"ways{length}"]
        self._begins, self._counts = arrays[f"begins{length}"], arrays[f"counts{length}"]
        self._tokens = arrays[f"tokens{length}"]
        self._taken = discount.amounts()

    def find(self, parent: int, token_id: int) -> int:
        """Id of the context that continues the context `parent` with a token; -1 if there is none."""
        key = np.uint64(parent << TOKEN_BITS | token_id)
        place = int(self._keys.searchsorted(key))
        return place if place < len(self._keys) and self._keys[place] == key else -1

    def tokens_of(self, context: int) -> Array:
        """Continuations of a context, the most frequent first, [num_seen]."""
        return self._tokens[self._begins[context] : self._begins[context + 1]]

    def kept_share(self, context: int, ranks: npt.NDArray[np.intp]) -> Floats:
        """Discounted relative frequency of the continuations at these ranks, [num_ranks]."""
        counts = self._counts[self._begins[context] + ranks]
        taken = self._taken[self._ways[context], np.minimum(counts, MAX_DISCOUNTED + 1)]
        share: Floats = (counts - taken) / self._totals[context]
        return share
