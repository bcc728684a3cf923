"""Text files as a stream of token ids.

It knows files, UTF-8 and tokenizers, not what is counted.
"""

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.ngram.counts import SEPARATOR, Counts

PIECE_BYTES = 1 << 20
"""A longer file is tokenized in pieces of this size, cut at line ends where it has them."""

BATCH_BYTES = 1 << 20
"""How much text goes to the tokenizer at once."""


class CorpusError(ValueError):
    """The corpus cannot be used; the text names the file and what is wrong."""


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that reads a corpus."""

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool = True) -> Sequence[Any]:
        """Tokenizes texts; each result has `ids`."""


def find_files(paths: Sequence[Path], suffixes: Sequence[str] = ()) -> list[Path]:
    """The files among `paths`, and those inside its folders, in a fixed order and each once.

    Args:
        paths: Files and folders.
        suffixes: Ends of names, such as ".py", that a file inside a folder must have one of; empty for any. A
            file that is named itself is always taken, and hidden files inside folders never are.

    Raises:
        CorpusError: A path does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if not hidden and file.name.endswith(tuple(suffixes) or "") and file.is_file():
                    found[file] = None
        elif path.is_file():
            found[path] = None
        else:
            raise CorpusError(f"{path} does not exist or is no file or folder")
    return list(found)


def token_stream(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[tuple[Counts, int]]:
    """Tokenizes files.

    Yields:
        Token ids with a `SEPARATOR` before each file, and the bytes of text read for them. [num_tokens]

    Raises:
        CorpusError: A file cannot be read or is not UTF-8.
    """
    texts: list[str] = []
    begins_file: list[bool] = []
    num_bytes = 0
    for file in files:
        for number, (text, size) in enumerate(_pieces(file)):
            texts.append(text)
            begins_file.append(number == 0)
            num_bytes += size
            if num_bytes >= BATCH_BYTES:
                yield _encode(texts, begins_file, tokenizer), num_bytes
                texts, begins_file, num_bytes = [], [], 0
    if texts:
        yield _encode(texts, begins_file, tokenizer), num_bytes


def _encode(texts: list[str], begins_file: list[bool], tokenizer: Tokenizer) -> Counts:
    parts = []
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for begins, encoding in zip(begins_file, encodings, strict=True):
        if begins:
            parts.append(np.array([SEPARATOR], dtype=np.int64))
        parts.append(np.array(encoding.ids, dtype=np.int64))
    return np.concatenate(parts)


def _pieces(file: Path) -> Iterator[tuple[str, int]]:
    """The text of a file in pieces, each with the bytes it took."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begun = ""  # an unfinished line
    num_decoded = 0  # bytes that are whole characters
    try:
        with file.open("rb") as source:
            while block := source.read(PIECE_BYTES):
                text = begun + decoder.decode(block)
                num_decoded = source.tell() - len(decoder.getstate()[0])
                end = text.rfind("\n") + 1 or len(text)
                yield text[:end], len(block)
                begun = text[end:]
        decoder.decode(b"", final=True)
        if begun:
            yield begun, 0
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise CorpusError(
            f"{file} is not UTF-8 text: byte {bad:#04x}, {num_decoded + error.start} bytes in"
        ) from error
    except OSError as error:
        raise CorpusError(f"{file} cannot be read: {error.strerror}") from error
