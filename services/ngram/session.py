"""One request's context, indexed so that earlier places like the present one are found at once.

It holds nothing of other requests, but may look at those of a memory. It does not know probabilities.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.ngram.counts import Counts
from services.ngram.memory import SuffixMemory
from stagespec.tree import DraftTree

Tokens = npt.NDArray[np.int32]

MAX_OCCURRENCES = 4096
"""Places looked at for one token, the latest ones: bounds the time of a lookup in a long context."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft, kept until it is known what the target drew.

    Attributes:
        length: Tokens of the context that it continues.
        noisy: Whether tokens are drawn at a temperature above 0.
        draft: The draft.
        guesses: For nodes, and the root, that were looked at: the likeliest children, the likeliest first,
            each with its estimate before calibration.
    """

    length: int
    noisy: bool
    draft: DraftTree
    guesses: Mapping[int, Sequence[tuple[int, float]]]


class NgramSession:
    """A context, and for each of its tokens where it occurs.

    Takes 8 bytes a context token, and about 150 for each distinct one. But for `drafted`, the state is a
    function of the context alone: whatever deltas led to it, it is that of a fresh session with this context.
    """

    def __init__(self, memory: SuffixMemory | None = None, owner: str = "") -> None:
        """Begins with an empty context.

        Args:
            memory: Where to look for other texts, and what takes in this one when the session closes; None
                for neither.
            owner: Whose texts.
        """
        self._memory = memory
        self._owner = owner
        self.drafted: Drafted | None = None
        self._tokens = array("i")
        self._places: dict[int, array[int]] = {}  # rising positions of each token in the context

    def __len__(self) -> int:
        return len(self._tokens)

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        """See `services.engine.Session`."""
        assert 0 <= base_length <= len(self._tokens), (base_length, len(self._tokens))
        if self.drafted is not None and base_length < self.drafted.length:
            self.drafted = None  # what it continued is no longer there
        while len(self._tokens) > base_length:
            token_id = self._tokens.pop()
            places = self._places[token_id]
            places.pop()
            if not places:
                del self._places[token_id]
        for position, token_id in enumerate(token_ids, start=base_length):
            self._tokens.append(token_id)
            self._places.setdefault(token_id, array("i")).append(position)

    def close(self) -> None:
        """See `services.engine.Session`."""
        if self._memory is not None:
            self._memory.add(self._owner, self._tokens)
        self.drafted = None
        self._tokens = array("i")
        self._places = {}

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of the context, or all if it has fewer."""
        return self._tokens[max(0, len(self._tokens) - count) :].tolist()

    def since(self, length: int) -> list[int]:
        """The tokens after the first `length`."""
        return self._tokens[length:].tolist()

    def occurrences(self, token_ids: Sequence[int]) -> Counts:
        """How often each token occurs in the context, [num_tokens]."""
        return np.array([len(self._places.get(token_id, ())) for token_id in token_ids], dtype=np.int64)

    def continuations(self, suffix: Sequence[int]) -> list[Tokens]:
        """What followed the end of `suffix` earlier in the context.

        >>> session = NgramSession()
        >>> session.apply(0, [1, 2, 3, 9, 2, 4, 1, 2])
        >>> [tokens.tolist() for tokens in session.continuations([9, 1, 2])]
        [[3, 4], [3]]

        Args:
            suffix: The last tokens of the context, or of a drafted path that continues it.

        Returns:
            For the last 1, 2, .. tokens of `suffix`, as long as the context has them with a token after them,
            each token that followed, in the order of the context. [num_matched] of [num_occurrences]
        """
        places = self._places.get(suffix[-1]) if suffix else None
        if places is None:
            return []
        context = np.frombuffer(self._tokens, dtype=np.int32)
        after = np.array(places[-MAX_OCCURRENCES:], dtype=np.int32) + 1  # of the tokens that followed
        after = after[after < len(context)]
        found: list[Tokens] = []
        for num_matched in range(1, len(suffix) + 1):
            if num_matched > 1:
                after = after[after >= num_matched]
                after = after[context[after - num_matched] == suffix[-num_matched]]
            if not len(after):
                break
            found.append(context[after])
        return found

    def remembered(self, suffix: Sequence[int]) -> list[Tokens]:
        """What followed the end of `suffix` in other texts, see `SuffixMemory.continuations`."""
        return [] if self._memory is None else self._memory.continuations(self._owner, suffix)
