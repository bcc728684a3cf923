"""The rows of a stage's sessions within one limit of bytes, and the pool of those that have ended.

Memory counts as it is reserved, whether or not all of it is in use. The pool lives on what live sessions
leave over and gives way to them. All but `new_rows` and the counters belongs to the thread that computes.
"""

import logging
from collections.abc import Callable, Sequence

import grpc

from services.causal_lm.fit import cache_limit
from services.causal_lm.load import LoadedModel
from services.causal_lm.memory import memory_of
from services.causal_lm.prefix_pool import PrefixPool
from services.causal_lm.rows import Rows
from services.causal_lm.settings import ModelSettings
from stagespec.rpc import RpcError

_log = logging.getLogger(__name__)

RETRY_S = 1.0


class SessionCache:
    """Hands out rows, takes them back, and refuses a session that would exceed the limit."""

    def __init__(
        self, new_rows: Callable[[], Rows], max_sessions: int, max_bytes: int, pool_bytes: int
    ) -> None:
        """Makes an empty cache.

        Args:
            new_rows: Makes the empty store of one session.
            max_sessions: Most sessions at once.
            max_bytes: Most bytes that rows take together, the pool's included.
            pool_bytes: Most bytes that the pool takes.
        """
        self._new_rows = new_rows
        self._max_bytes = max_bytes
        self._pool = PrefixPool(pool_bytes)
        self._keeps = pool_bytes > 0
        self._live: dict[Rows, int] = {}  # bytes of each
        self._live_bytes = 0
        self._num_hits = self._num_reused = self._num_refusals = 0
        block = new_rows().capacity_for(1)
        num_blocks = max_bytes // (block * new_rows().row_bytes)
        # However the tokens are spread over the sessions, each wastes less than a block.
        self.max_tokens = num_blocks * block - max_sessions * (block - 1)

    @property
    def num_live(self) -> int:
        """Sessions that have rows."""
        return len(self._live)

    @property
    def counters(self) -> dict[str, int]:
        """For GetStats. May be read from any thread."""
        return {
            "cache_bytes_live": self._live_bytes,
            "cache_refusals_total": self._num_refusals,
            "prefix_pool_bytes_live": self._pool.num_bytes,
            "prefix_pool_entries_live": len(self._pool),
            "prefix_pool_hits_total": self._num_hits,
            "prefix_pool_rows_total": self._num_reused,
            "prefix_pool_evictions_total": self._pool.num_evictions,
        }

    def new_rows(self) -> Rows:
        """An empty store. May be called from any thread."""
        return self._new_rows()

    def open(self, rows: Rows, tenant: str, context: Sequence[int]) -> Rows:
        """The rows to begin a session with: those of an earlier one that began alike, or none.

        Args:
            rows: The session's empty store.
            tenant: Whose session it is.
            context: Its first context.
        """
        match = self._pool.find(tenant, context) if self._keeps and context else None
        if match is None:
            return rows
        old, num_shared = match.rows, match.num_shared
        num_bytes = old.capacity_for(len(context)) * old.row_bytes
        if num_shared < len(old) and num_bytes <= self._max_bytes - self._live_bytes - self._pool.num_bytes:
            # Others may come for the rest, so this one gets a copy.
            try:
                rows = old.fork(num_shared, len(context))
            except RuntimeError:  # the device has less than it said
                _log.exception("%d bytes of cache could not be allocated", num_bytes)
                return rows
        else:
            self._pool.take(old)
            old.truncate(num_shared)
            rows = old
        self._book(rows)
        self._num_hits += 1
        self._num_reused += num_shared
        return rows

    def reserve(self, rows: Rows, num_rows: int) -> None:
        """Makes sure that a session has memory for so many rows in all.

        Raises:
            RpcError: RESOURCE_EXHAUSTED: CACHE_FULL while other sessions have what is missing, or
                CACHE_TOO_SMALL if there will never be enough. Nothing has changed then.
        """
        if num_rows <= rows.capacity:
            return
        needed = rows.capacity_for(num_rows) * rows.row_bytes
        if needed > self._max_bytes:
            self._num_refusals += 1
            message = (
                f"{num_rows} tokens of context and draft take {needed} bytes of cache and the stage has "
            )
            message += f"{self._max_bytes} in all (max_cache_bytes); send a shorter context"
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "CACHE_TOO_SMALL", message)
        missing = needed - rows.num_bytes
        if self._live_bytes + missing > self._max_bytes:
            raise self._full(missing)
        while self._live_bytes + self._pool.num_bytes + missing > self._max_bytes:
            self._pool.evict()
        try:
            rows.reserve(num_rows)
        except RuntimeError as error:  # the device has less than it said
            _log.exception("%d bytes of cache could not be allocated", missing)
            raise self._full(missing) from error
        finally:
            self._book(rows)

    def close(self, rows: Rows, tenant: str | None) -> None:
        """Takes a session's rows back.

        Args:
            rows: Its rows, which it must not use any more.
            tenant: For whom the context may stay in the pool; None if it must not.
        """
        self._live_bytes -= self._live.pop(rows, 0)
        if tenant is None or not self._keeps:
            rows.release()
            return
        rows.truncate(rows.path_length)
        self._pool.put(tenant, rows)

    def _book(self, rows: Rows) -> None:
        self._live_bytes += rows.num_bytes - self._live.get(rows, 0)
        self._live[rows] = rows.num_bytes

    def _full(self, missing: int) -> RpcError:
        self._num_refusals += 1
        message = (
            f"{len(self._live)} sessions take {self._live_bytes} bytes of cache, this one needs {missing} "
        )
        message += f"more, and the limit is {self._max_bytes} (max_cache_bytes); try again when one has ended"
        return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "CACHE_FULL", message, retry_after=RETRY_S)


def new_cache(settings: ModelSettings, loaded: LoadedModel) -> SessionCache:
    """The cache of a stage that has loaded its model; the stage's information gets what it holds.

    Raises:
        UnservableModelError: Its limit is out of range, or there is no memory for it.
    """
    rows = loaded.new_rows()
    block, info = rows.capacity_for(1), loaded.info
    memory = memory_of(settings.device)
    limit = cache_limit(settings, rows.row_bytes, info.max_context_length, block, memory)
    pool = min(settings.prefix_pool_bytes, limit)
    cache = SessionCache(loaded.new_rows, settings.max_sessions, limit, pool)
    info.max_cache_tokens = cache.max_tokens
    return cache
