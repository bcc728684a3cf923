"""Siblings in a draft: the nodes below one parent, ranked by how likely they were thought."""

from collections import Counter

from stagespec.tree import ROOT, DraftTree


def sibling_ranks(draft: DraftTree) -> list[int]:
    """For each node how many of its siblings were thought likelier; at a tie the earlier one is.

    >>> sibling_ranks(DraftTree((5, 6, 7), (-1, -1, 0), (-2.0, -1.0, -3.0), (0,) * 3))
    [1, 0, 0]
    """
    ranks = [0] * len(draft)
    num_ranked: Counter[int] = Counter()
    for node in sorted(range(len(draft)), key=lambda n: (-draft.log_probs[n], n)):
        parent = draft.parents[node]
        ranks[node] = num_ranked[parent]
        num_ranked[parent] += 1
    return ranks


def likeliest_children(draft: DraftTree, max_children: int) -> DraftTree:
    """The draft with at most so many children of each node, the likeliest of them and what follows these.

    >>> draft = DraftTree((5, 6, 7), (-1, -1, 0), (-2.0, -1.0, -3.0), (0,) * 3)
    >>> likeliest_children(draft, 1).token_ids
    (6,)
    """
    kept = {ROOT}
    for node, (parent, rank) in enumerate(zip(draft.parents, sibling_ranks(draft), strict=True)):
        if rank < max_children and parent in kept:
            kept.add(node)
    kept.discard(ROOT)
    return draft if len(kept) == len(draft) else draft.select(sorted(kept))
