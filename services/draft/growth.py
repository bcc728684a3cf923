"""Grows the best tree from what the draft model knows, best-first over path probability.

Expanding a node whose candidates are known is free; a node whose candidates are not known is a leaf, and what
another round would add there is reported, not bought.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from services.draft.candidates import Candidates
from stagespec.tree import EMPTY_DRAFT, ROOT, DraftTree
from stagespec.v1.drafter_pb2 import Budget


@dataclass(frozen=True, slots=True)
class Growth:
    """A grown tree.

    Attributes:
        draft: The tree.
        next_round_gain: Committed tokens that knowing the leaves' candidates would be expected to add.
    """

    draft: DraftTree
    next_round_gain: float


def grow(
    known: Callable[[tuple[int, ...]], Candidates | None],
    hint: DraftTree,
    budget: Budget,
    drafter_index: int,
) -> Growth:
    """Grows the tree of the most probable paths.

    Args:
        known: Candidates after a path of drafted tokens, or None where the model has not looked.
        hint: The draft so far. Its nodes keep their owners where the tree takes them in.
        budget: Limits and prices; a node less probable than `node_price` is not taken.
        drafter_index: Owner of the other nodes.

    Returns:
        At most `max_nodes` nodes on at most `max_depth` levels, with at most `max_children` to a node.
    """
    hinted = hint.children()
    min_log_prob = math.log(budget.node_price) if budget.node_price > 0 else -math.inf
    order = itertools.count()  # at equal probability, first come first served
    # (-path log prob, order, parent, token, log prob, path, the hint's node)
    heap: list[tuple[float, int, int, int, float, tuple[int, ...], int | None]] = []
    rows: list[tuple[int, int, float, int]] = []
    leaves: list[float] = []  # path probability of nodes whose candidates are not known
    best_children: list[float] = []
    last = 0.0

    def expand(parent: int, hint_parent: int | None, path: tuple[int, ...], log_prob: float) -> None:
        if len(path) >= budget.max_depth:
            return
        candidates = known(path)
        if candidates is None:
            leaves.append(math.exp(log_prob))
            return
        guesses = {} if hint_parent is None else hinted.get(hint_parent, {})
        if candidates.log_probs:
            best_children.append(math.exp(candidates.log_probs[0]))
        most = budget.max_children or None
        for token_id, child in zip(candidates.token_ids[:most], candidates.log_probs, strict=False):
            total = log_prob + child
            if total >= min_log_prob:
                entry = (
                    -total,
                    next(order),
                    parent,
                    token_id,
                    child,
                    (*path, token_id),
                    guesses.get(token_id),
                )
                heapq.heappush(heap, entry)

    expand(ROOT, ROOT, (), 0.0)
    while heap and len(rows) < budget.max_nodes:
        cost, _, parent, token_id, log_prob, path, hint_node = heapq.heappop(heap)
        owner = drafter_index if hint_node is None else hint.drafter_indices[hint_node]
        rows.append((token_id, parent, log_prob, owner))
        last = math.exp(-cost)
        expand(len(rows) - 1, hint_node, path, -cost)

    # A new level under a leaf is worth its best child, less the node that must make room for it.
    displaced = last if len(rows) >= budget.max_nodes else 0.0
    typical = sum(best_children) / len(best_children) if best_children else 0.0
    gain = sum(max(0.0, leaf * typical - displaced) for leaf in leaves)
    draft = DraftTree(*zip(*rows, strict=True)) if rows else EMPTY_DRAFT
    return Growth(draft, gain if rows else 0.0)
