"""One request's context, indexed so that earlier places like the present one are found at once.

It holds nothing of other requests and does not know probabilities.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.ngram.counts import Counts

Tokens = npt.NDArray[np.int32]

MAX_OCCURRENCES = 4096
"""Places looked at for one token, the latest ones: bounds the time of a lookup in a long context."""


class NgramSession:
    """A context, and for each of its tokens where it occurs.

    Takes 8 bytes a context token, and about 150 for each distinct one. The state is a function of the context
    alone: whatever deltas led to it, it is what a fresh session with this context has.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._places: dict[int, array[int]] = {}  # rising positions of each token in the context

    def __len__(self) -> int:
        return len(self._tokens)

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        """See `services.engine.Session`."""
        assert 0 <= base_length <= len(self._tokens), (base_length, len(self._tokens))
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
        self._tokens = array("i")
        self._places = {}

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of the context, or all if it has fewer."""
        return self._tokens[max(0, len(self._tokens) - count) :].tolist()

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
