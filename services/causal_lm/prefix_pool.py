"""Contexts of finished sessions, kept for whoever continues them: the least recently used ones go first.

Rows of one tenant are never given to another, because the time they save would tell what was asked before. It
does not know sessions or the memory they share with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.causal_lm.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One context: whose it is, its tokens and their rows."""

    tenant: str
    token_ids: npt.NDArray[np.int32]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Match:
    """Rows in the pool that begin as a context does.

    Attributes:
        rows: The rows.
        num_shared: How many of the first ones fit the context.
    """

    rows: Rows
    num_shared: int


class PrefixPool:
    """A bounded pool of rows. All of an entry's rows are on its path.

    Attributes:
        num_bytes: What the rows take now.
        num_evictions: Entries that had to go for want of room.
    """

    def __init__(self, max_bytes: int) -> None:
        """Makes an empty pool.

        Args:
            max_bytes: Most bytes to keep; 0 keeps nothing.
        """
        self.num_bytes = 0
        self.num_evictions = 0
        self._max_bytes = max_bytes
        self._entries: list[_Entry] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tenant: str, context: Sequence[int]) -> Match | None:
        """The tenant's entry that shares the longest prefix with a context, if any shares a token."""
        wanted = np.asarray(context, dtype=np.int32)
        best, most = None, 0
        for entry in self._entries:
            if entry.tenant == tenant:
                num_shared = _num_shared(entry.token_ids, wanted)
                if num_shared > most:
                    best, most = entry, num_shared
        if best is None:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        return Match(best.rows, most)

    def put(self, tenant: str, rows: Rows) -> None:
        """Takes rows over; where they do not fit or add nothing, their memory is given back.

        Args:
            tenant: Whose they are.
            rows: All on their path. Nobody else may use them any more.
        """
        token_ids = np.asarray(rows.token_ids, dtype=np.int32)
        for entry in list(self._entries):
            if entry.tenant != tenant:
                continue
            num_shared = _num_shared(entry.token_ids, token_ids)
            if num_shared == len(token_ids):
                rows.release()
                return
            if num_shared == len(entry.token_ids):
                self.take(entry.rows)
                entry.rows.release()
        if not len(rows) or rows.num_bytes > self._max_bytes:
            rows.release()
            return
        while self.num_bytes + rows.num_bytes > self._max_bytes:
            self.evict()
        self._entries.append(_Entry(tenant, token_ids, rows))
        self.num_bytes += rows.num_bytes

    def take(self, rows: Rows) -> None:
        """Hands an entry's rows out; they are the caller's from then on."""
        self._entries = [entry for entry in self._entries if entry.rows is not rows]
        self.num_bytes -= rows.num_bytes

    def evict(self) -> None:
        """Gives the memory of the least recently used entry back."""
        rows = self._entries[0].rows
        self.take(rows)
        rows.release()
        self.num_evictions += 1


def _num_shared(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
