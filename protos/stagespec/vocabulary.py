"""What makes two tokenizers the same: the bytes behind every token id, hashed.

Model sizes may be padded beyond the tokenizer; padding is no difference. It does not know about models.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

SPACE_MARKER = "\u2581"
"""Stands for a space in SentencePiece vocabularies."""


class FastTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that this module reads."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Token string -> id."""

    def to_str(self, pretty: bool = False) -> str:
        """The whole tokenizer as JSON."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every token id's bytes, and which ids are special.

    Attributes:
        tokens: Bytes by token id; empty where no text maps to the id.
        special_ids: Ids that ordinary text never produces.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]

    @property
    def hash(self) -> str:
        """SHA-256, in hexadecimal, over length-prefixed bytes and the special mark of every id in order."""
        digest = hashlib.sha256()
        for token_id, token in enumerate(self.tokens):
            digest.update(len(token).to_bytes(4, "little"))
            digest.update(token)
            digest.update(b"\x01" if token_id in self.special_ids else b"\x00")
        return digest.hexdigest()


def read_vocabulary(tokenizer: FastTokenizer) -> Vocabulary:
    """Reads the bytes of every token of a byte-level or SentencePiece tokenizer.

    Args:
        tokenizer: A fast tokenizer, such as `tokenizers.Tokenizer.from_file("tokenizer.json")`.

    Returns:
        The vocabulary, without trailing ids that no token has.
    """
    definition = json.loads(tokenizer.to_str())
    added = {entry["id"]: entry for entry in definition.get("added_tokens", [])}
    decoder_kinds = set(_component_types(definition.get("decoder")))
    byte_of = _byte_level_alphabet() if "ByteLevel" in decoder_kinds else None
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = []
    for token_id in range(max(by_id, default=-1) + 1):
        text = by_id.get(token_id)
        if text is None:
            tokens.append(b"")
        elif token_id in added:
            tokens.append(text.encode())
        elif byte_of is not None:
            # A character outside the alphabet stands for itself: such tokens exist in patched vocabularies.
            tokens.append(b"".join(byte_of.get(char, char.encode()) for char in text))
        elif "ByteFallback" in decoder_kinds and _is_byte_token(text):
            tokens.append(bytes([int(text[3:5], 16)]))
        else:
            tokens.append(text.replace(SPACE_MARKER, " ").encode())
    special = frozenset(token_id for token_id, entry in added.items() if entry.get("special"))
    return Vocabulary(tuple(tokens), special)


def first_difference(ours: Vocabulary, theirs: Vocabulary) -> str | None:
    """Names the first id at which two vocabularies differ, with both strings; None if they are the same.

    >>> first_difference(Vocabulary((b"a", b"b"), frozenset()), Vocabulary((b"a", b"c"), frozenset()))
    "token id 1 is 'b' here and 'c' there"
    """
    for token_id in range(max(len(ours.tokens), len(theirs.tokens))):
        mine, other = _describe(ours, token_id), _describe(theirs, token_id)
        if mine != other:
            return f"token id {token_id} is {mine} here and {other} there"
    return None


def _describe(vocabulary: Vocabulary, token_id: int) -> str:
    if token_id >= len(vocabulary.tokens):
        return "missing"
    text = repr(vocabulary.tokens[token_id].decode(errors="backslashreplace"))
    return f"{text} (special)" if token_id in vocabulary.special_ids else text


def _component_types(component: dict[str, Any] | None) -> Iterator[str]:
    if component is None:
        return
    yield component["type"]
    for child in component.get("decoders", []):
        yield from _component_types(child)


def _is_byte_token(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _byte_level_alphabet() -> dict[str, bytes]:
    """The printable stand-ins of GPT-2's byte-level tokenizers: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in characters):
        characters[byte] = chr(256 + offset)
    return {character: bytes([byte]) for byte, character in characters.items()}
