"""The cache of sessions against an oracle without one: each row belongs to its tenant and token path."""

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.causal_lm.rows import BLOCK, Rows
from services.causal_lm.session_cache import SessionCache
from stagespec.rpc import RpcError

ROW_BYTES = 16


def new_rows() -> Rows:
    return Rows(num_layers=1, num_heads=1, head_dim=1, device=torch.device("cpu"), dtype=torch.float64)


def new_cache(num_blocks: int, pool_blocks: int, max_sessions: int = 4) -> SessionCache:
    block = BLOCK * ROW_BYTES
    return SessionCache(new_rows, max_sessions, num_blocks * block, pool_blocks * block)


def fingerprint(tenant: str, path: tuple[int, ...]) -> float:
    return float(hash((tenant, path)) % 2**40)


def read(cache: SessionCache, tenant: str, context: list[int], rows: Rows | None = None) -> tuple[Rows, int]:
    """Brings a session to a context; returns its rows and how many it had to compute."""
    if rows is None:
        rows = cache.open(cache.new_rows(), tenant, context)
    rows.follow(context)
    rows.truncate(rows.path_length)
    cache.reserve(rows, len(context))
    first = len(rows)
    rows.extend(context[first:])
    for row in range(first, len(context)):
        value = fingerprint(tenant, tuple(context[: row + 1]))
        rows.keys[:, :, row] = value
        rows.values[:, :, row] = -value
    return rows, len(context) - first


def assert_holds(rows: Rows, tenant: str, context: list[int]) -> None:
    assert rows.token_ids == context
    for row in range(len(context)):
        value = fingerprint(tenant, tuple(context[: row + 1]))
        assert (rows.keys[0, 0, row, 0, 0], rows.values[0, 0, row, 0]) == (value, -value)


TOKENS = st.lists(st.integers(0, 1), max_size=6)
# Who, what to do, how much of the context to keep, tokens to append, and whether to append a block of zeros.
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["go", "go", "close", "drop"]), st.integers(0, 400), TOKENS,
              st.booleans()),
    max_size=20,
)  # fmt: skip


@settings(deadline=None, max_examples=80)
@given(STEPS, st.integers(0, 8), st.integers(4, 12))
def test_whatever_sessions_do_their_rows_are_their_own_and_memory_is_bounded(steps, pool_blocks, num_blocks):
    cache = new_cache(num_blocks, pool_blocks)
    live: dict[int, tuple[Rows, list[int]]] = {}
    kept: list[tuple[str, list[int]]] = []  # every context that may have been pooled
    for who, action, base, fresh, long in steps:
        tenant = "ab"[who % 2]
        if action != "go":
            if who in live:
                rows, context = live.pop(who)
                cache.close(rows, tenant if action == "close" else None)
                kept += [(tenant, context)] if action == "close" else []
        else:
            rows, before = live.get(who, (None, []))
            context = before[: base % (len(before) + 1)] + [0] * (100 * long) + fresh
            hits = cache.counters["prefix_pool_hits_total"]
            if rows is None:
                rows = cache.open(cache.new_rows(), tenant, context)
            try:
                rows, num_computed = read(cache, tenant, context, rows)
            except RpcError:
                live.pop(who, None)
                cache.close(rows, None)
                continue
            live[who] = rows, context
            if not before:
                known = [shared(context, other) for owner, other in kept if owner == tenant]
                assert len(context) - num_computed <= max(known, default=0), "rows of another tenant"
                assert (cache.counters["prefix_pool_hits_total"] > hits) == (num_computed < len(context))
        for who_lives, (rows, context) in live.items():
            assert_holds(rows, "ab"[who_lives % 2], context)
        counters = cache.counters
        assert counters["cache_bytes_live"] == sum(rows.num_bytes for rows, _ in live.values())
        assert counters["prefix_pool_bytes_live"] <= pool_blocks * BLOCK * ROW_BYTES
        total = counters["cache_bytes_live"] + counters["prefix_pool_bytes_live"]
        assert total <= num_blocks * BLOCK * ROW_BYTES


def shared(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
    )


@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(5, 12))
def test_tokens_within_the_limit_always_fit(sizes, num_blocks):
    cache = new_cache(num_blocks, 2)
    while sum(sizes) > cache.max_tokens:
        sizes = [size - 1 for size in sizes if size > 1]
    for size in sizes:
        read(cache, "", [0] * size)
    assert cache.num_live == len(sizes)


def test_a_next_turn_takes_the_rows_over_and_others_share_what_they_can():
    cache = new_cache(8, 8)
    context = list(range(150))
    rows, num_computed = read(cache, "a", context)
    assert num_computed == 150
    cache.close(rows, "a")
    assert cache.counters["cache_bytes_live"] == 0
    # Another tenant, or another beginning: nothing.
    assert read(cache, "b", context)[1] == 150
    assert read(cache, "a", [9, *context])[1] == 151
    # Part of it is copied, all of it is moved.
    assert read(cache, "a", [*context[:100], 7])[1] == 1
    assert cache.counters["prefix_pool_entries_live"] == 1
    next_turn, num_computed = read(cache, "a", [*context, 7, 8])
    assert (next_turn is rows, num_computed) == (True, 2)
    assert cache.counters["prefix_pool_entries_live"] == 0
    assert cache.counters["prefix_pool_rows_total"] == 250
    # Longer than asked: the end is left out.
    cache.close(next_turn, "a")
    assert read(cache, "a", context[:60])[1] == 0


def test_the_least_recently_used_context_goes_first_and_the_pool_gives_way():
    cache = new_cache(num_blocks=4, pool_blocks=2)
    for first in (1, 2, 3):
        cache.close(read(cache, "", [first] * 50)[0], "")
    assert cache.counters["prefix_pool_evictions_total"] == 1
    assert [read(cache, "", [first] * 51)[1] for first in (3, 1)] == [1, 51]
    assert cache.counters["prefix_pool_entries_live"] == 1
    read(cache, "", [4] * 200)
    assert cache.counters["prefix_pool_entries_live"] == 0, "live sessions need it more"


def test_what_does_not_fit_is_refused_and_harms_nobody():
    cache = new_cache(num_blocks=3, pool_blocks=0)
    rows, _ = read(cache, "", [1] * 200)
    with pytest.raises(RpcError) as full:
        read(cache, "", [2] * 200)
    assert (full.value.code, full.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CACHE_FULL")
    assert full.value.retry_after is not None
    assert f"limit is {3 * BLOCK * ROW_BYTES}" in full.value.message
    with pytest.raises(RpcError) as never:
        cache.reserve(rows, 3 * BLOCK + 1)
    assert (never.value.reason, never.value.retry_after) == ("CACHE_TOO_SMALL", None)
    assert_holds(rows, "", [1] * 200)
    assert read(cache, "", [1] * 250, rows)[1] == 50
    assert cache.counters["cache_refusals_total"] == 2
    cache.close(rows, "")
    assert read(cache, "", [2] * 300)[1] == 300
