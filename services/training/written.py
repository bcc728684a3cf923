"""What a model wrote, as a stream of token ids: another corpus than text files.

It knows collections of `stagespec train-draft collect`, not what is counted.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from services.ngram.corpus import CorpusError
from services.ngram.counts import SEPARATOR, Counts
from services.training.collection import CollectionError, read_parts, read_settings


def written_stream(folder: Path, tokenizer_hash: str) -> Iterator[tuple[Counts, int]]:
    """Reads a collection, prompts and continuations alike.

    Args:
        folder: The collection.
        tokenizer_hash: What its token ids must be of.

    Yields:
        Token ids with a `SEPARATOR` before each sequence, and the bytes that stand for them. [num_tokens]

    Raises:
        CorpusError: It is no collection, is damaged, or has ids of another tokenizer.
    """
    try:
        found = read_settings(folder).get("tokenizer_hash")
        if found != tokenizer_hash:
            raise CorpusError(
                f"{folder} was written with another tokenizer ({str(found)[:12]}...) than the one given "
                f"({tokenizer_hash[:12]}...)"
            )
        for part in read_parts(folder):
            ends = np.cumsum(part.lengths.numpy())[:-1]
            ids = part.token_ids.numpy().astype(np.int64)
            yield np.insert(ids, [0, *ends], SEPARATOR), ids.nbytes
    except CollectionError as error:
        raise CorpusError(str(error)) from error
