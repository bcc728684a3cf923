"""Siblings by rank, and how often each rank was right, against definitions that are slow and obvious."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.ranks import LAST_DEPTH, LAST_RANK, RankAccount
from stagespec.siblings import likeliest_children, sibling_ranks
from stagespec.tree import ROOT, DraftTree


@st.composite
def drafts(draw, max_size: int = 24) -> DraftTree:
    """Trees with ties, of two drafters."""
    size = draw(st.integers(0, max_size))
    parents = tuple(draw(st.integers(max(ROOT, node - 3), node - 1)) for node in range(size))
    log_probs = tuple(draw(st.sampled_from([-2.0, -1.0, -0.5])) for _ in range(size))
    owners = tuple(draw(st.integers(0, 1)) for _ in range(size))
    return DraftTree(tuple(range(size)), parents, log_probs, owners)


def rank(draft: DraftTree, node: int) -> int:
    siblings = [other for other, parent in enumerate(draft.parents) if parent == draft.parents[node]]
    return sum(
        draft.log_probs[other] > draft.log_probs[node]
        or (draft.log_probs[other] == draft.log_probs[node] and other < node)
        for other in siblings
    )


@given(drafts())
def test_a_rank_counts_the_siblings_that_come_before(draft):
    assert sibling_ranks(draft) == [rank(draft, node) for node in range(len(draft))]


@given(drafts(), st.integers(1, 4))
def test_the_likeliest_children_are_kept_with_what_follows_them(draft, max_children):
    kept = [
        node
        for node in range(len(draft))
        if all(rank(draft, above) < max_children for above in draft.path(node))
    ]
    assert likeliest_children(draft, max_children) == draft.select(kept)


@given(drafts(), st.data())
def test_ranks_count_where_the_target_came(draft, data):
    account, expected = RankAccount(), Counter[tuple[str, int, int, bool]]()
    for _ in range(2):
        end = data.draw(st.integers(ROOT, len(draft) - 1))
        accepted = draft.path(end)
        account.add(draft, accepted)
        for node, owner in enumerate(draft.drafter_indices):
            if draft.parents[node] in (ROOT, *accepted):
                expected["ab"[owner], len(draft.path(node)) - 1, rank(draft, node), node in accepted] += 1
    capped = Counter[tuple[str, int, int, bool]]()
    for (name, depth, place, was_right), count in expected.items():
        capped[name, min(depth, LAST_DEPTH), min(place, LAST_RANK), was_right] += count
    found = account.to_proto(["a", "b"])
    assert [(each.drafter, each.depth, each.rank) for each in found] == sorted({key[:3] for key in capped})
    for each in found:
        right, wrong = (capped[each.drafter, each.depth, each.rank, flag] for flag in (True, False))
        assert (each.num_reached, each.num_accepted) == (right + wrong, right)


def test_the_last_depth_and_the_last_rank_hold_all_later_ones():
    account = RankAccount()
    deep = DraftTree(tuple(range(20)), tuple(range(-1, 19)), (-1.0,) * 20, (0,) * 20)
    account.add(deep, range(18))
    wide = DraftTree(tuple(range(12)), (ROOT,) * 12, (-1.0,) * 12, (1,) * 12)
    account.add(wide, [9])
    found = account.to_proto(["deep", "wide"])
    last = [each for each in found if each.drafter == "deep"][-1]
    assert (last.depth, last.num_reached, last.num_accepted) == (15, 4, 3)
    last = found[-1]
    assert (last.rank, last.num_reached, last.num_accepted) == (7, 5, 1)
