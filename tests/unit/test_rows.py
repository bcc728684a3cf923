"""Rows against replay from scratch: any sequence of context moves, with drafted nodes in between."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.causal_lm.rows import BLOCK, Rows

TOKENS = st.integers(0, 2)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 12),  # base length, taken modulo what there is
        st.lists(TOKENS, max_size=5),
        st.lists(st.tuples(st.integers(-1, 5), TOKENS), max_size=6),  # drafted: parent, token
    ),
    max_size=8,
)


def fingerprint(path: tuple[int, ...]) -> float:
    """What a row must hold: a number that belongs to the token path alone."""
    value = 1.0
    for token_id in path:
        value = value * 5 + token_id + 1
    return value


def path_of(rows: Rows, row: int) -> tuple[int, ...]:
    path = []
    while row >= 0:
        path.append(rows.token_ids[row])
        row = rows.parents[row]
    return tuple(reversed(path))


def fill(rows: Rows, row: int) -> None:
    block = rows.keys.shape[4]
    rows.keys[:, :, row // block, :, row % block] = fingerprint(path_of(rows, row))
    rows.values[:, :, row] = -fingerprint(path_of(rows, row))


def assert_holds(rows: Rows, row: int, path: tuple[int, ...]) -> None:
    block = rows.keys.shape[4]
    assert rows.keys[0, 0, row // block, 0, row % block] == fingerprint(path)
    assert rows.values[0, 0, row, 0] == -fingerprint(path)


@given(STEPS, st.sampled_from([1, 3]))
def test_any_sequence_of_moves_keeps_each_row_with_its_path(steps, key_block):
    device = torch.device("cpu")
    rows = Rows(
        num_layers=1, num_heads=1, head_dim=1, device=device, dtype=torch.float64, key_block=key_block
    )
    context: list[int] = []
    computed: set[tuple[int, ...]] = set()
    for base, token_ids, drafted in steps:
        base = base % (len(context) + 1)
        context[base:] = token_ids
        before = {path_of(rows, row) for row in range(len(rows))}
        rows.follow(context, base)
        reusable = 0
        while reusable < len(context) and tuple(context[: reusable + 1]) in before:
            reusable += 1
        assert rows.path_length == reusable, "a row that fits the context was lost"
        if reusable < len(context):
            rows.truncate(reusable)
            rows.extend(context[reusable:])
        for row in range(reusable, len(context)):
            fill(rows, row)
        copy = rows.fork(len(context) // 2, 0)
        assert copy.token_ids == context[: len(context) // 2]
        for row in range(len(copy)):
            assert_holds(copy, row, path_of(rows, row))
        computed = {path_of(rows, row) for row in range(len(rows))}
        nodes: list[int] = []
        for parent, token_id in drafted:
            at = len(context) - 1 if parent < 0 or parent >= len(nodes) else nodes[parent]
            row = rows.find(at, token_id)
            if row is None:
                row = rows.add(at, token_id)
                fill(rows, row)
            nodes.append(row)
        for row in range(len(rows)):
            assert_holds(rows, row, path_of(rows, row))
            assert rows.position(row) == len(path_of(rows, row)) - 1
            mask = rows.visibility([row])[0]
            seen = [r for r in range(len(rows)) if mask[r]]
            ancestors = {path_of(rows, row)[:n] for n in range(1, len(path_of(rows, row)) + 1)}
            assert {path_of(rows, r) for r in seen} == ancestors
            assert len(seen) == len(ancestors)
    assert computed >= {tuple(context[:n]) for n in range(1, len(context) + 1)}


def test_capacity_grows_by_blocks_and_keeps_what_is_there():
    rows = Rows(num_layers=2, num_heads=1, head_dim=1, device=torch.device("cpu"), dtype=torch.float64)
    assert rows.num_bytes == 0
    for length in range(1, 3 * BLOCK):
        rows.extend([length % 3])
        rows.keys[:, :, length - 1] = rows.values[:, :, length - 1] = length
        assert length <= rows.capacity < length + BLOCK
        assert rows.num_bytes == rows.capacity * rows.row_bytes
    expected = torch.arange(1, 3 * BLOCK, dtype=torch.float64)
    assert torch.equal(rows.values[1, 0, : len(rows), 0], expected)
    assert torch.equal(rows.keys[1, 0, : len(rows), 0, 0], expected)
    rows.release()
    assert (len(rows), rows.path_length, rows.num_bytes) == (0, 0, 0)
