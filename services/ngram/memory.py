"""Texts of finished sessions, indexed so that earlier places like the present one are found without a scan.

A ring of tokens holds the documents one after the other, and the oldest make room for new ones. Places whose
last tokens hash alike are chained from the latest back, as LZ77 compressors do it (RFC 1951, section 4). Each
document belongs to one owner and is found by this owner alone. It does not know probabilities.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.ngram.counts import SEPARATOR

Tokens = npt.NDArray[np.int32]

MIN_MATCH = 3
"""Shortest match that counts in other texts: shorter ones say little and are everywhere."""

MAX_PLACES = 64
"""Places looked at in one lookup, the latest ones."""

_SLOTS_PER_TOKEN = 2  # of the index: few places then share a chain by chance
_MIXERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)  # odd, bits mixed


@dataclass(frozen=True, slots=True)
class _Document:
    begin: int  # of its separator, counted from the first token ever
    end: int
    owner: str


class SuffixMemory:
    """Documents, all of them together bounded. One thread, but for the counts.

    Takes 36 to 52 bytes for each token that it may hold, touched as it fills.

    Attributes:
        num_documents: Documents held.
        num_tokens: Tokens of them.
        num_hits: Lookups that found anything.
    """

    def __init__(self, max_tokens: int, max_document_tokens: int) -> None:
        """Makes an empty memory.

        Args:
            max_tokens: Most tokens of all documents, one for each document included that parts it from the
                last.
            max_document_tokens: Of a longer document only the last so many are kept.
        """
        self.num_documents = self.num_tokens = self.num_hits = 0
        self._size = max_tokens
        self._longest = min(max_document_tokens, max_tokens - 1)
        self._documents: deque[_Document] = deque()
        self._owners: dict[str, tuple[int, int]] = {}  # number, and documents held
        self._next_owner = 1
        self._end = 0  # of the last document, counted from the first token ever
        self._tokens: Tokens = np.zeros(max_tokens, dtype=np.int32)
        self._owner_of = np.zeros(max_tokens, dtype=np.int64)
        self._previous = np.zeros(max_tokens, dtype=np.int64)  # place with the same hash, plus 1; 0 for none
        num_slots = 1 << (_SLOTS_PER_TOKEN * max_tokens - 1).bit_length()
        self._mask = num_slots - 1
        self._latest = np.zeros(num_slots, dtype=np.int64)  # by hash; likewise
        # Single numbers are read and written through these, faster than through the arrays.
        self._previous_view = memoryview(self._previous.data)
        self._latest_view = memoryview(self._latest.data)

    def add(self, owner: str, token_ids: Sequence[int]) -> None:
        """Takes in a document; the oldest go as far as there is no room. Too short ones are left out.

        Args:
            owner: Who alone will find it.
            token_ids: Its tokens. [num_tokens]
        """
        kept = list(token_ids[-self._longest :])
        if len(kept) <= MIN_MATCH:
            return
        while self._documents and self._end + 1 + len(kept) - self._documents[0].begin > self._size:
            self._forget_oldest()
        number, num_documents = self._owners.get(owner, (self._next_owner, 0))
        self._next_owner = max(self._next_owner, number + 1)
        self._owners[owner] = (number, num_documents + 1)
        begin = self._end
        self._end = begin + 1 + len(kept)
        self._documents.append(_Document(begin, self._end, owner))
        self.num_documents += 1
        self.num_tokens += len(kept)

        slots = np.arange(begin, self._end) % self._size
        self._tokens[slots] = [SEPARATOR, *kept]
        self._owner_of[slots] = number
        # A place is that of a token which follows a match.
        for index in range(MIN_MATCH, len(kept)):
            place = begin + 1 + index
            slot = self._hash(number, kept[index - MIN_MATCH : index])
            self._previous_view[place % self._size] = self._latest_view[slot]
            self._latest_view[slot] = place + 1

    def continuations(self, owner: str, suffix: Sequence[int]) -> list[Tokens]:
        """What followed the end of `suffix` in the owner's documents.

        >>> memory = SuffixMemory(max_tokens=100, max_document_tokens=50)
        >>> memory.add("", [1, 2, 3, 4, 9, 2, 3, 4, 7])
        >>> [tokens.tolist() for tokens in memory.continuations("", [1, 2, 3, 4])]
        [[9, 7], [9]]

        Args:
            owner: Whose documents to look at.
            suffix: The last tokens of a context, or of a drafted path that continues it.

        Returns:
            For the last `MIN_MATCH`, `MIN_MATCH` + 1, .. tokens of `suffix`, as long as a document has them
            with a token after them, each token that followed, the oldest first. Only the latest `MAX_PLACES`
            places are looked at. [num_matched] of [num_places]
        """
        if owner not in self._owners or len(suffix) < MIN_MATCH:
            return []
        number = self._owners[owner][0]
        places = self._chain(self._hash(number, suffix[-MIN_MATCH:]))
        places = places[self._owner_of[places % self._size] == number]
        found: list[Tokens] = []
        for num_matched in range(1, len(suffix) + 1):
            # A match never runs over a separator, which no token is equal to.
            places = places[self._tokens[(places - num_matched) % self._size] == suffix[-num_matched]]
            if not len(places):
                break
            if num_matched >= MIN_MATCH:
                found.append(self._tokens[places % self._size])
        self.num_hits += bool(found)
        return found

    def _chain(self, slot: int) -> npt.NDArray[np.int64]:
        """The latest places of a hash, the oldest first."""
        places = list[int]()
        oldest = self._documents[0].begin
        following = self._latest_view[slot]
        # Places are chained in falling order, and the slots of those before the oldest are another's by now.
        while following > oldest and len(places) < MAX_PLACES:
            places.append(following - 1)
            following = self._previous_view[(following - 1) % self._size]
        return np.array(places[::-1], dtype=np.int64)

    def _hash(self, number: int, token_ids: Sequence[int]) -> int:
        mixed = number * _MIXERS[0]
        for token_id, mixer in zip(token_ids, _MIXERS[1:], strict=True):
            mixed ^= (token_id + 1) * mixer
        return mixed >> 20 & self._mask

    def _forget_oldest(self) -> None:
        document = self._documents.popleft()
        number, num_documents = self._owners[document.owner]
        if num_documents == 1:
            del self._owners[document.owner]
        else:
            self._owners[document.owner] = (number, num_documents - 1)
        slots = np.arange(document.begin, document.end) % self._size
        self._tokens[slots] = SEPARATOR
        self.num_documents -= 1
        self.num_tokens -= document.end - document.begin - 1
