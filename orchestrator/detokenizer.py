"""Text from tokens as they come, without broken characters.

It works on the bytes behind the tokens; which of them end a text is decided in stopping.py.
"""

import codecs

from stagespec.vocabulary import Vocabulary


class Detokenizer:
    r"""Turns the tokens of one generation into text, a token at a time.

    Bytes that may still become a character wait for the next token; bytes that never can become U+FFFD at
    once, as in `bytes.decode(errors="replace")`. Special tokens have no text. The output continues a prompt,
    so a leading space that a SentencePiece decoder would drop at the start of a text stays.

    >>> detokenizer = Detokenizer(Vocabulary((b"\xc3", b"\xa9", b"!"), frozenset()))
    >>> [detokenizer.decode(token_id) for token_id in (0, 1, 2, 0)], detokenizer.flush()
    (['', 'é', '!', ''], '\ufffd')
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, token_id: int, *, show_special: bool = False) -> str:
        """The text that is complete with this token. May be empty."""
        if token_id in self._vocabulary.special_ids and not show_special:
            return ""
        return self._decoder.decode(self._vocabulary.tokens[token_id])

    def flush(self) -> str:
        """The text of what still waited, at the end."""
        return self._decoder.decode(b"", final=True)
