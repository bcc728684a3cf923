"""Shares one forward pass among the sessions that are ready, so that each of them gets on.

Sessions that decode all take part, with their drafts pruned to the rows there are; long prompts go in chunks,
small ones while others decode. It does not know what is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagespec.tree import EMPTY_DRAFT, DraftTree

DECODING_ROWS = 16
"""A session with more uncached context tokens than this is reading a prompt."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one session would run if it were alone.

    Attributes:
        num_context: Context tokens that have no rows yet.
        arrived: When it was asked for.
        draft: The draft that follows once the context is complete.
        nodes: Which of its nodes are to run, in rising order.
    """

    num_context: int
    arrived: float
    draft: DraftTree = EMPTY_DRAFT
    nodes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """What one session runs in a pass.

    Attributes:
        index: Its place among the needs.
        num_context: Context tokens, the next ones in order.
        nodes: Nodes of its draft, in rising order. None before the context is complete.
    """

    index: int
    num_context: int
    nodes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PassLimits:
    """How large a pass may be.

    Attributes:
        max_rows: Most rows. At least 2.
        chunk: Most context tokens of prompts, all sessions together, when nobody decodes.
        shared_chunk: Likewise when somebody does.
    """

    max_rows: int
    chunk: int
    shared_chunk: int


def share_pass(needs: Sequence[Need], limits: PassLimits, *, others_decode: bool = False) -> list[Share]:
    """Decides who runs in the next pass, and how far.

    Sessions that decode come first, in order of arrival, but for rows that are set aside for prompts. Of the
    rows for prompts half go to the oldest, and the rest to whoever can be through soonest. What rows are left
    go to the drafted nodes that are most likely to be reached, whosever they are.

    >>> limits = PassLimits(max_rows=512, chunk=256, shared_chunk=32)
    >>> share_pass([Need(2000, arrived=1.0), Need(1, arrived=2.0)], limits)
    [Share(index=1, num_context=1, nodes=()), Share(index=0, num_context=32, nodes=())]
    >>> share_pass([Need(2000, arrived=1.0)], limits)
    [Share(index=0, num_context=256, nodes=())]

    Args:
        needs: One entry a session.
        limits: How large the pass may be.
        others_decode: Whether there are sessions that are not ready now and will be soon.

    Returns:
        One entry for each session in the pass, with at least one row; one that needs no context may be left
        with none.
    """
    most = min(DECODING_ROWS, limits.chunk)
    line = sorted(range(len(needs)), key=lambda index: needs[index].arrived)
    decoding = [index for index in line if needs[index].num_context <= most]
    prompts = {index: needs[index].num_context for index in line if needs[index].num_context > most}

    room_for_prompts = limits.chunk
    if decoding or others_decode:
        room_for_prompts = min(limits.chunk, limits.shared_chunk)
    if decoding:
        room_for_prompts = min(room_for_prompts, limits.max_rows // 2)
    room_for_prompts = min(room_for_prompts, limits.max_rows, sum(prompts.values()))

    room = limits.max_rows - room_for_prompts
    counts: dict[int, int] = {}
    for index in decoding:
        count = min(needs[index].num_context, room)
        if count or not needs[index].num_context:
            counts[index] = count
            room -= count
    counts |= _share_prompts(prompts, room_for_prompts)
    complete = [index for index, count in counts.items() if count == needs[index].num_context]
    nodes = _share_nodes({index: needs[index] for index in complete}, room)
    return [Share(index, count, nodes.get(index, ())) for index, count in counts.items()]


def _share_prompts(prompts: dict[int, int], room: int) -> dict[int, int]:
    """Rows for each prompt, given what each needs, the oldest first."""
    if not prompts or not room:
        return {}
    oldest = next(iter(prompts))
    counts = {oldest: min(prompts[oldest], -(-room // 2))}
    room -= counts[oldest]
    for index in sorted(prompts, key=lambda index: prompts[index] - counts.get(index, 0)):
        more = min(prompts[index] - counts.get(index, 0), room)
        if more:
            counts[index] = counts.get(index, 0) + more
            room -= more
    return counts


def _share_nodes(needs: dict[int, Need], room: int) -> dict[int, Sequence[int]]:
    """The nodes of each session that run."""
    if sum(len(need.nodes) for need in needs.values()) <= room:
        return {index: need.nodes for index, need in needs.items()}
    ranked: list[tuple[float, int, int]] = []
    for index, need in needs.items():
        log_probs = need.draft.path_log_probs
        ranked += [(-log_probs[node], node, index) for node in need.nodes]
    # A child is never more probable than its parent, and at a tie the lower node, which is the parent, wins.
    ranked.sort()
    kept: dict[int, list[int]] = {index: [] for index in needs}
    for _, node, index in ranked[:room]:
        kept[index].append(node)
    return {index: sorted(nodes) for index, nodes in kept.items()}
