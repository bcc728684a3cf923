"""Builds an n-gram table from text: count, prune to the size asked for, fit, store.

The same files, tokenizer and limits give the same bytes. It does not know the command line.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from services.ngram import katz, layout
from services.ngram.corpus import CorpusError, Tokenizer, find_files, token_stream
from services.ngram.counts import MAX_VOCABULARY_SIZE, Counts, Mask, NgramCounts, add, count_ngrams
from services.ngram.settings import MAX_ORDER, MIN_ORDER
from services.ngram.table import store
from stagespec.vocabulary import FastTokenizer, read_vocabulary

CHUNK_TOKENS = 1 << 19
"""Tokens counted at once."""

MAX_NGRAMS = 60_000_000
"""Most distinct n-grams held while counting, at 16 bytes each and twice that for a moment."""


class CorpusTokenizer(Tokenizer, FastTokenizer, Protocol):
    """A tokenizer that encodes text and lists its vocabulary, such as `tokenizers.Tokenizer`."""


@dataclass(frozen=True, slots=True)
class BuildSummary:
    """What was built.

    Attributes:
        path: The table.
        num_bytes: Its size.
        sha256: Of the file, in hexadecimal.
        order: Length of the longest n-grams.
        vocabulary_size: Number of token ids.
        tokenizer_hash: The tokenizer it is made for.
        num_files: Text files read.
        num_text_bytes: Bytes in them.
        num_tokens: Tokens in them.
        num_counted: Distinct n-grams by length, from 1.
        num_kept: Those in the table.
        discounting: How each length is discounted: "good-turing" or "absolute".
    """

    path: str
    num_bytes: int
    sha256: str
    order: int
    vocabulary_size: int
    tokenizer_hash: str
    num_files: int
    num_text_bytes: int
    num_tokens: int
    num_counted: tuple[int, ...]
    num_kept: tuple[int, ...]
    discounting: tuple[str, ...]


def build_table(
    paths: Sequence[Path],
    tokenizer: CorpusTokenizer,
    output: Path,
    *,
    order: int = 3,
    max_bytes: int | None = None,
    min_count: int = 1,
    suffixes: Sequence[str] = (),
    collections: Sequence[Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> BuildSummary:
    """Counts the n-grams of text files and of what a model wrote, and writes the table.

    Args:
        paths: Files, and folders whose files are read.
        tokenizer: Makes tokens of text.
        output: Where the table goes; replaced at the end, all at once.
        order: Length of the longest n-grams, from 2 to 5.
        max_bytes: Size the file must not exceed; the rarest of the longest n-grams go first. None
            for no limit.
        min_count: N-grams of two or more tokens that occur less often are left out.
        suffixes: Ends of the names of files to take from folders; empty for any.
        collections: Folders of `stagespec train-draft collect`, counted beside the files.
        progress: Told the bytes of text counted so far and in all.

    Raises:
        CorpusError: A file is missing, unreadable or not UTF-8, or there is too little or too much text.
        ValueError: A setting is outside its limits, which the text names.
    """
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise ValueError(f"order is {order} and must be from {MIN_ORDER} to {MAX_ORDER}")
    if min_count < 1:
        raise ValueError(f"min_count is {min_count} and must be at least 1")
    if not output.parent.is_dir():
        raise ValueError(f"output is {output}, and the folder {output.parent} does not exist")
    if output.is_dir():
        raise ValueError(f"output is {output}, which is a folder and must be a file")
    vocabulary = read_vocabulary(tokenizer)
    vocabulary_size = len(vocabulary.tokens)
    if vocabulary_size > MAX_VOCABULARY_SIZE:
        raise ValueError(f"the tokenizer has {vocabulary_size} token ids; the limit is {MAX_VOCABULARY_SIZE}")
    longer = [0] * (order - 1)
    smallest = layout.arrays_of([1, *longer], [vocabulary_size, *longer], vocabulary_size)[1]
    if max_bytes is not None and max_bytes < smallest:
        raise ValueError(
            f"max_bytes is {max_bytes}; a table for {vocabulary_size} token ids needs {smallest} at least"
        )

    files = find_files(paths, suffixes)
    num_text_bytes = sum(file.stat().st_size for file in files)
    stream = token_stream(files, tokenizer)
    if collections:
        from services.training.written import written_stream  # brings torch, which a stage must not

        stream = chain(stream, *(written_stream(folder, vocabulary.hash) for folder in collections))
    counted = _count(stream, num_text_bytes, order, progress)
    num_tokens = int(counted.counts[0].sum())
    if not len(counted.keys[-1]):
        text = f"{num_tokens} tokens" if num_tokens else "no text"
        raise CorpusError(
            f"{', '.join(map(str, [*paths, *collections]))} has {text}; "
            f"a table of order {order} needs a file of {order} tokens or more"
        )
    if num_tokens >= 1 << 32:
        raise CorpusError(f"the corpus has {num_tokens} tokens; the table counts up to {(1 << 32) - 1}")
    kept = prune(counted, vocabulary_size, max_bytes=max_bytes, min_count=min_count)
    model = katz.fit(counted, kept, vocabulary_size)
    sha256 = store(output, model, vocabulary.hash)
    return BuildSummary(
        path=str(output),
        num_bytes=output.stat().st_size,
        sha256=sha256,
        order=order,
        vocabulary_size=vocabulary_size,
        tokenizer_hash=vocabulary.hash,
        num_files=len(files),
        num_text_bytes=num_text_bytes,
        num_tokens=num_tokens,
        num_counted=tuple(map(len, counted.counts)),
        num_kept=tuple(map(len, model.ngrams.counts)),
        discounting=tuple("good-turing" if d.good_turing else "absolute" for d in model.discounts),
    )


def prune(
    counted: NgramCounts, vocabulary_size: int, *, max_bytes: int | None = None, min_count: int = 1
) -> list[Mask]:
    """Which n-grams to keep, for each length.

    Those of two or more tokens that occur less than `min_count` times go in any case. Then, while the table
    is too large, the rarest of the longest n-grams go, of equally rare ones those with the highest token ids:
    low ids are frequent tokens in most vocabularies. Shorter n-grams only go once no longer one is left.
    """
    kept: list[Mask] = [np.ones(len(counted.keys[0]), dtype=np.bool_)]
    kept += [counts >= min_count for counts in counted.counts[1:]]
    if max_bytes is None:
        return kept
    for length in range(counted.order, 0, -1):
        kept, fits = _shorten(counted, kept, length, vocabulary_size, max_bytes)
        if fits:
            break
    return kept


def _shorten(
    counted: NgramCounts, kept: list[Mask], length: int, vocabulary_size: int, max_bytes: int
) -> tuple[list[Mask], bool]:
    """Keeps as many n-grams of one length as fit, and says whether the table then fits."""
    ranked = np.argsort(-counted.counts[length - 1], kind="stable")
    ranked = ranked[kept[length - 1][ranked]]

    def keep(num_ngrams: int) -> list[Mask]:
        mask: Mask = np.zeros(len(counted.keys[length - 1]), dtype=np.bool_)
        mask[ranked[:num_ngrams]] = True
        return [*kept[: length - 1], mask, *kept[length:]]

    def num_bytes(num_ngrams: int) -> int:
        return _num_bytes(counted, keep(num_ngrams), vocabulary_size)

    # Position 0 of the bisection stands for no n-gram of this length at all.
    num_fitting = bisect_right(range(len(ranked) + 1), max_bytes, key=num_bytes) - 1
    return keep(max(0, num_fitting)), num_fitting >= 0


def _num_bytes(counted: NgramCounts, kept: Sequence[Mask], vocabulary_size: int) -> int:
    """Size of the table that keeps these n-grams."""
    num_contexts = []
    for length, mask in enumerate(kept, start=1):
        prefixes = counted.prefixes(length)[mask]
        num_contexts.append(int(np.count_nonzero(np.diff(prefixes, prepend=-1))))
    return layout.arrays_of(num_contexts, [int(mask.sum()) for mask in kept], vocabulary_size)[1]


def _count(
    stream: Iterable[tuple[Counts, int]],
    num_text_bytes: int,
    order: int,
    progress: Callable[[int, int], None] | None,
) -> NgramCounts:
    """Counts chunk by chunk; what is held grows with the distinct n-grams, not with the text."""
    # Sums are kept as runs of falling size and only runs of like size are added, so that each n-gram is
    # copied about log(number of chunks) times.
    runs: list[NgramCounts] = []
    carried = np.empty(0, dtype=np.int64)
    waiting, num_waiting, num_bytes = list[Counts](), 0, 0

    def count_waiting() -> None:
        nonlocal carried, waiting, num_waiting
        joined = np.concatenate([carried, *waiting])
        runs.append(count_ngrams(joined, order, len(carried)))
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]):
            runs.append(add(runs.pop(), runs.pop()))
        carried, waiting, num_waiting = joined[1 - order :], [], 0
        num_ngrams = sum(map(len, runs))
        if num_ngrams > MAX_NGRAMS:
            raise CorpusError(
                f"the first {num_bytes} bytes of the corpus have {num_ngrams} n-grams of up to {order} "
                f"tokens and the limit is {MAX_NGRAMS}; use less text or a lower order"
            )

    for token_ids, size in stream:
        waiting.append(token_ids)
        num_waiting += len(token_ids)
        num_bytes += size
        if num_waiting >= CHUNK_TOKENS:
            count_waiting()
        if progress is not None:
            progress(num_bytes, max(num_bytes, num_text_bytes))
    count_waiting()
    return reduce(add, reversed(runs))
