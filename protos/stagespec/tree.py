"""The token tree as a value: its rules, its geometry, and the repair of trees that break the rules.

It does not know who proposes trees or how they are checked.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from stagespec.v1.draft_pb2 import DraftTree as DraftTreeMessage

ROOT = -1
"""Parent of the nodes that continue the last context token."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A forest of guessed continuations of a context, flat, parents before children.

    Attributes:
        token_ids: The guessed token of each node.
        parents: Index of each node's parent, or `ROOT`.
        log_probs: Estimated log probability that a node is drawn, given that its parent was reached.
        drafter_indices: Who proposed each node.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    drafter_indices: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.parents), len(self.log_probs), len(self.drafter_indices))
        assert len(set(lengths)) == 1, f"the lists of a draft differ in length: {lengths}"
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), self.parents

    @property
    def depths(self) -> list[int]:
        """Depth of each node; children of the last context token have depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    @property
    def path_log_probs(self) -> list[float]:
        """Estimated log probability that each node is reached and drawn."""
        totals: list[float] = []
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            totals.append(log_prob + (0.0 if parent == ROOT else totals[parent]))
        return totals

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, inclusive.

        >>> DraftTree((7, 8, 9), (-1, 0, 0), (0.0,) * 3, (0,) * 3).path(2)
        [0, 2]
        """
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def children(self) -> dict[int, dict[int, int]]:
        """For each parent (`ROOT` included) that has children: token id -> node."""
        children: dict[int, dict[int, int]] = {}
        for node, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            children.setdefault(parent, {})[token_id] = node
        return children

    def select(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of `nodes` alone, in rising order and closed under taking parents."""
        position = {node: index for index, node in enumerate(nodes)}
        position[ROOT] = ROOT
        return DraftTree(
            tuple(self.token_ids[node] for node in nodes),
            tuple(position[self.parents[node]] for node in nodes),
            tuple(self.log_probs[node] for node in nodes),
            tuple(self.drafter_indices[node] for node in nodes),
        )

    def to_proto(self) -> DraftTreeMessage:
        """The message that carries this tree."""
        return DraftTreeMessage(
            token_ids=self.token_ids,
            parents=self.parents,
            log_probs=self.log_probs,
            drafter_indices=self.drafter_indices,
        )


EMPTY_DRAFT = DraftTree()
"""No guess at all: legal everywhere, and plain decoding when the verifier gets it."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """A tree that keeps the rules, made of one that perhaps did not.

    Attributes:
        tree: What was kept.
        sent_indices: For each kept node its index in the tree as it was sent.
        num_dropped: Nodes that broke a rule or a limit, with their descendants. Merged siblings don't count.
    """

    tree: DraftTree
    sent_indices: tuple[int, ...]
    num_dropped: int


def repair(
    message: DraftTreeMessage,
    *,
    vocabulary_size: int,
    max_nodes: int,
    max_depth: int | None = None,
    sender: int = 0,
) -> Repaired:
    """Reads a tree from outside: drops what breaks a rule, merges equal siblings, cuts to the limits.

    >>> sent = DraftTreeMessage(token_ids=[5, 5, 6, 99], parents=[-1, -1, 1, 0])
    >>> repaired = repair(sent, vocabulary_size=10, max_nodes=8)
    >>> repaired.tree.token_ids, repaired.tree.parents, repaired.sent_indices, repaired.num_dropped
    ((5, 6), (-1, 0), (0, 2), 1)

    Args:
        message: The tree as sent.
        vocabulary_size: Tokens must be below this.
        max_nodes: Most nodes to keep; the most probable ones stay.
        max_depth: Most levels to keep; None for no limit.
        sender: Owner of the nodes when the message doesn't name owners.

    Returns:
        The repaired tree. Never raises: an unusable message gives the empty tree.
    """
    num_sent = len(message.token_ids)
    log_probs = message.log_probs or [0.0] * num_sent
    drafter_indices = message.drafter_indices or [sender] * num_sent
    num_usable = min(num_sent, len(message.parents), len(log_probs), len(drafter_indices))

    kept_as: dict[int, int] = {ROOT: ROOT}  # sent index -> kept index
    known: dict[tuple[int, int], int] = {}  # (kept parent, token) -> kept index
    rows: list[tuple[int, int, float, int]] = []
    sent_indices: list[int] = []
    depths: list[int] = []
    num_dropped = num_sent - num_usable
    for sent in range(num_usable):
        token_id, log_prob = message.token_ids[sent], log_probs[sent]
        parent = kept_as.get(message.parents[sent])
        depth = 0 if parent in (None, ROOT) else depths[parent] + 1
        if (
            parent is None
            or not 0 <= token_id < vocabulary_size
            or not (math.isfinite(log_prob) and log_prob <= 0.0)
            or (max_depth is not None and depth >= max_depth)
        ):
            num_dropped += 1
            continue
        twin = known.get((parent, token_id))
        if twin is not None:
            kept_as[sent] = twin
            continue
        kept_as[sent] = known[parent, token_id] = len(rows)
        rows.append((token_id, parent, log_prob, drafter_indices[sent]))
        sent_indices.append(sent)
        depths.append(depth)

    tree = DraftTree(*zip(*rows, strict=True)) if rows else EMPTY_DRAFT
    kept = most_probable(tree, max_nodes)
    if len(kept) < len(tree):
        num_dropped += len(tree) - len(kept)
        tree, sent_indices = tree.select(kept), [sent_indices[node] for node in kept]
    return Repaired(tree, tuple(sent_indices), num_dropped)


def most_probable(tree: DraftTree, max_nodes: int) -> list[int]:
    """The `max_nodes` nodes most likely to be reached, in rising order; parents always come with children.

    A child is never more probable than its parent, and at a tie the lower index, which is the parent's, wins.
    """
    if len(tree) <= max_nodes:
        return list(range(len(tree)))
    path_log_probs = tree.path_log_probs
    return sorted(heapq.nsmallest(max_nodes, range(len(tree)), key=lambda n: (-path_log_probs[n], n)))
