"""How often drafts were right, by who proposed a node, how deep it stood and how likely it was thought."""

from collections import Counter
from collections.abc import Sequence

from stagespec.siblings import sibling_ranks
from stagespec.tree import ROOT, DraftTree
from stagespec.v1.generation_pb2 import RankStats

LAST_DEPTH = 15
"""Holds all deeper nodes too."""

LAST_RANK = 7
"""Holds all less likely siblings too."""


class RankAccount:
    """Counts the nodes of a generation's drafts that the target came to."""

    def __init__(self) -> None:
        self._reached: Counter[tuple[int, int, int]] = Counter()
        self._accepted: Counter[tuple[int, int, int]] = Counter()

    def add(self, draft: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Takes one verified draft into the account."""
        came_to, accepted = {ROOT, *accepted_nodes}, set(accepted_nodes)
        places = zip(draft.drafter_indices, draft.depths, sibling_ranks(draft), strict=True)
        for node, (owner, depth, rank) in enumerate(places):
            if draft.parents[node] in came_to:
                place = (owner, min(depth, LAST_DEPTH), min(rank, LAST_RANK))
                self._reached[place] += 1
                self._accepted[place] += node in accepted

    def to_proto(self, names: Sequence[str]) -> list[RankStats]:
        """The messages that show it.

        Args:
            names: Of the drafters, by the index that marks their nodes.
        """
        return [
            RankStats(
                drafter=names[owner],
                depth=depth,
                rank=rank,
                num_reached=num_reached,
                num_accepted=self._accepted[owner, depth, rank],
            )
            for (owner, depth, rank), num_reached in sorted(self._reached.items())
        ]
