"""Rows against replay from scratch: any sequence of context moves, with drafted nodes in between."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.causal_lm.rows import Rows

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
    rows.keys[:, :, row] = fingerprint(path_of(rows, row))
    rows.values[:, :, row] = -fingerprint(path_of(rows, row))


@given(STEPS)
def test_any_sequence_of_moves_keeps_each_row_with_its_path(steps):
    rows = Rows(num_layers=1, num_heads=1, head_dim=1, device=torch.device("cpu"), dtype=torch.float64)
    context: list[int] = []
    computed: set[tuple[int, ...]] = set()
    for base, token_ids, drafted in steps:
        base = base % (len(context) + 1)
        context[base:] = token_ids
        before = {path_of(rows, row) for row in range(len(rows))}
        rows.follow(context)
        reusable = 0
        while reusable < len(context) and tuple(context[: reusable + 1]) in before:
            reusable += 1
        assert rows.path_length == reusable, "a row that fits the context was lost"
        for token_id in context[reusable:]:
            fill(rows, rows.add(len(rows) - 1, token_id))
        rows.grow_path(len(context))
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
            assert rows.keys[0, 0, row, 0] == fingerprint(path_of(rows, row))
            assert rows.values[0, 0, row, 0] == -fingerprint(path_of(rows, row))
            assert rows.position(row) == len(path_of(rows, row)) - 1
            mask = rows.visibility([row])[0]
            seen = [r for r in range(len(rows)) if mask[r]]
            ancestors = {path_of(rows, row)[:n] for n in range(1, len(path_of(rows, row)) + 1)}
            assert {path_of(rows, r) for r in seen} == ancestors
            assert len(seen) == len(ancestors)
    assert computed >= {tuple(context[:n]) for n in range(1, len(context) + 1)}
