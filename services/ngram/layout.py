"""The file of an n-gram table: a header that proves the file whole, then plain arrays to be memory-mapped.

    offset 0   magic, 8 bytes
    offset 8   version, uint32; length of the JSON, uint32; size of the file, uint64 (all little-endian)
    offset 24  SHA-256 of the file without these 32 bytes
    offset 56  JSON (a `Header`), then zeros up to HEADER_BYTES, then the arrays in the order of `arrays_of`

It does not know what the arrays mean.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"STGNGRAM"
VERSION = 1
HEADER_BYTES = 4096

_FIXED = struct.Struct("<8sIIQ32s")
_DIGEST_AT = _FIXED.size - 32
_ALIGNMENT = 8

Array = npt.NDArray[Any]


class TableError(ValueError):
    """A file is no usable n-gram table; the text names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a table says of itself.

    Attributes:
        vocabulary_size: Number of token ids.
        tokenizer_hash: SHA-256 of the vocabulary, see `stagespec.vocabulary`.
        num_contexts: For each length of n-grams. [order]
        num_ngrams: For each length of n-grams. [order]
        good_turing: For each length of n-grams, see `katz.Discount`. [order] of [0 or k]
        absolute: For each length of n-grams, see `katz.Discount`. [order]
    """

    vocabulary_size: int
    tokenizer_hash: str
    num_contexts: tuple[int, ...]
    num_ngrams: tuple[int, ...]
    good_turing: tuple[tuple[float, ...], ...]
    absolute: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where one array lies in the file."""

    dtype: npt.DTypeLike
    offset: int
    length: int


def arrays_of(
    num_contexts: Sequence[int], num_ngrams: Sequence[int], vocabulary_size: int
) -> tuple[dict[str, ArrayPlace], int]:
    """Where every array lies, by name ("keys" of length 2 is "keys2"), and the size of the file in bytes."""
    token_type = "<u2" if vocabulary_size <= 1 << 16 else "<u4"
    places, end = {}, HEADER_BYTES
    for length, (contexts, ngrams) in enumerate(zip(num_contexts, num_ngrams, strict=True), start=1):
        for name, dtype, size in (
            ("keys", "<u8", contexts),
            ("backoffs", "<f8", contexts),
            ("totals", "<u4", contexts),
            ("begins", "<u4", contexts + 1),
            ("counts", "<u4", ngrams),
            ("tokens", token_type, ngrams),
            ("ways", "u1", contexts),
        ):
            places[f"{name}{length}"] = ArrayPlace(dtype, end, size)
            end += -(-size * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end


def write(path: Path, header: Header, arrays: Mapping[str, Array]) -> str:
    """Writes a table beside its place, then moves it there, so that no half of one is ever seen.

    Returns:
        SHA-256 of the file, in hexadecimal.
    """
    places, size = arrays_of(header.num_contexts, header.num_ngrams, header.vocabulary_size)
    text = json.dumps(asdict(header), sort_keys=True).encode()
    assert len(text) <= HEADER_BYTES - _FIXED.size, "the header has outgrown its place"
    content = bytearray(size)
    _FIXED.pack_into(content, 0, MAGIC, VERSION, len(text), size, bytes(32))
    content[_FIXED.size : _FIXED.size + len(text)] = text
    for name, place in places.items():
        np.frombuffer(content, place.dtype, place.length, place.offset)[:] = arrays[name]
    content[_DIGEST_AT : _FIXED.size] = _digest(memoryview(content))

    unfinished = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return hashlib.sha256(content).hexdigest()


def read(path: Path) -> tuple[Header, dict[str, Array], int]:
    """Maps a table into memory after checking all of it (0.07 s for 100 MB).

    Returns:
        The header, the arrays by name (read-only), and the size in bytes.

    Raises:
        TableError: The file cannot be read, is no table, of another version, truncated or altered.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES:
                raise TableError(
                    f"{path} has {size} bytes: too short for an n-gram table ({HEADER_BYTES} or more)"
                )
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise TableError(f"n-gram table {path} cannot be read: {error.strerror}") from error
    magic, version, text_length, stated_size, digest = _FIXED.unpack_from(content)
    if magic != MAGIC:
        raise TableError(f"{path} is no n-gram table: it does not begin with {MAGIC.decode()}")
    if version != VERSION:
        raise TableError(f"{path} is an n-gram table of version {version}; this program reads {VERSION}")
    if size != stated_size:
        raise TableError(f"{path} is damaged: it has {size} bytes and its header says {stated_size}")
    if _digest(memoryview(content)) != digest:
        raise TableError(f"{path} is damaged: its content does not have the SHA-256 that its header says")
    fields = json.loads(content[_FIXED.size : _FIXED.size + text_length])
    header = Header(
        vocabulary_size=fields["vocabulary_size"],
        tokenizer_hash=fields["tokenizer_hash"],
        num_contexts=tuple(fields["num_contexts"]),
        num_ngrams=tuple(fields["num_ngrams"]),
        good_turing=tuple(map(tuple, fields["good_turing"])),
        absolute=tuple(fields["absolute"]),
    )
    places, _ = arrays_of(header.num_contexts, header.num_ngrams, header.vocabulary_size)
    arrays: dict[str, Array] = {
        name: np.frombuffer(content, place.dtype, place.length, place.offset)
        for name, place in places.items()
    }
    return header, arrays, size


def _digest(content: memoryview) -> bytes:
    digest = hashlib.sha256(content[:_DIGEST_AT])
    digest.update(content[_FIXED.size :])
    return digest.digest()
