"""Where a generation ends: committed tokens and their text are cut here and nowhere else.

Rules are checked after each token, in the order of the tokens, so that it makes no difference how many
tokens a step commits. Who made the tokens is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.detokenizer import Detokenizer
from stagespec.v1.generation_pb2 import FinishReason


@dataclass(frozen=True, slots=True)
class StopRules:
    """When one generation ends.

    Attributes:
        max_tokens: Most tokens to generate.
        num_context_left: Tokens that the model's context still takes after the prompt; None for no limit.
        min_tokens: Stop tokens and stop strings don't match within this many first tokens.
        strings: Texts that end the generation.
        token_ids: Tokens of the request that end it.
        eos_token_ids: End-of-sequence tokens that end it; empty if they are to be ignored.
        include_in_text: Whether the text of what stopped it stays.
    """

    max_tokens: int
    num_context_left: int | None = None
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    include_in_text: bool = False

    @property
    def end_token_ids(self) -> list[int]:
        """The tokens that cannot be drawn within the first `min_tokens`."""
        return sorted(self.eos_token_ids | self.token_ids)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended, and what matched if something did."""

    reason: FinishReason.ValueType
    token_id: int | None = None
    string: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The part of a step's committed tokens that belongs to the generation.

    Attributes:
        token_ids: The tokens, the one that stopped it included.
        texts: The text that became final with each token.
        finish: Why the generation ends with the last token; None if it goes on.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    finish: Finish | None = None


class Stopper:
    """Applies the rules of one generation to its tokens as they are committed."""

    def __init__(self, rules: StopRules, detokenizer: Detokenizer) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._num_generated = 0
        self._held = ""  # text that may still become part of a stop string

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        limit = self._rules.max_tokens
        if self._rules.num_context_left is not None:
            limit = min(limit, self._rules.num_context_left)
        return limit - self._num_generated

    def clip(self, token_ids: Sequence[int]) -> Output:
        """Takes the next committed tokens, up to the first one that ends the generation."""
        texts: list[str] = []
        for token_id in token_ids:
            text, finish = self._take(token_id)
            texts.append(text)
            if finish is not None:
                return Output(tuple(token_ids[: len(texts)]), tuple(texts), finish)
        return Output(tuple(token_ids), tuple(texts))

    def _take(self, token_id: int) -> tuple[str, Finish | None]:
        rules = self._rules
        self._num_generated += 1
        may_stop = self._num_generated > rules.min_tokens
        if may_stop and token_id in rules.eos_token_ids:
            return self._end_at_token(token_id, FinishReason.FINISH_REASON_EOS)
        if may_stop and token_id in rules.token_ids:
            return self._end_at_token(token_id, FinishReason.FINISH_REASON_STOP)

        num_seen = len(self._held)
        self._held += self._detokenizer.decode(token_id)
        match = _first_match(self._held, rules.strings, num_seen) if may_stop else None
        if match is not None:
            begin, string = match
            text = self._held[: begin + len(string) if rules.include_in_text else begin]
            return text, Finish(FinishReason.FINISH_REASON_STOP, string=string)
        if self._num_generated == rules.max_tokens:
            return self._held + self._detokenizer.flush(), Finish(FinishReason.FINISH_REASON_LENGTH)
        if self._num_generated == rules.num_context_left:
            return self._held + self._detokenizer.flush(), Finish(FinishReason.FINISH_REASON_CONTEXT_LENGTH)

        num_final = len(self._held) - _length_of_start(self._held, rules.strings)
        final, self._held = self._held[:num_final], self._held[num_final:]
        return final, None

    def _end_at_token(self, token_id: int, reason: FinishReason.ValueType) -> tuple[str, Finish]:
        text = self._held
        if self._rules.include_in_text:
            text += self._detokenizer.decode(token_id, show_special=True)
        return text + self._detokenizer.flush(), Finish(reason, token_id=token_id)


def _first_match(text: str, strings: Sequence[str], num_seen: int) -> tuple[int, str] | None:
    """The string that is complete first when `text` comes a character at a time, past `num_seen`.

    >>> _first_match("a END of", ["of", "END", "D"], 2)
    (2, 'END')

    Returns:
        Where it begins, and the string; the longest one where several end together. None if none does.
    """
    found = []
    for string in strings:
        begin = text.find(string, max(0, num_seen - len(string) + 1))
        if begin >= 0:
            found.append((begin + len(string), begin, string))
    if not found:
        return None
    _, begin, string = min(found)
    return begin, string


def _length_of_start(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of the strings may begin with.

    >>> _length_of_start("the E", ["END"]), _length_of_start("the End", ["END"])
    (1, 0)
    """
    longest = 0
    for string in strings:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
