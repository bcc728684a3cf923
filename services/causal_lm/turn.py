"""Shares one forward pass among the sessions that are ready: long prefills in chunks, nobody starves."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """What one session would run if it were alone.

    Attributes:
        num_context: Context tokens that have no rows yet.
        num_nodes: Drafted nodes that follow once the context is complete.
        arrived: When it was asked for.
    """

    num_context: int
    num_nodes: int
    arrived: float


def share_pass(needs: Sequence[Need], *, max_rows: int, chunk: int) -> list[tuple[int, int]]:
    """Decides who runs in the next pass, and how far.

    Sessions that can finish in one pass go first, in order of arrival, so that a long prompt does not stall
    those that decode. The first in line always runs, however many rows it needs.

    >>> needs = [Need(2000, 0, 1.0), Need(1, 8, 2.0)]
    >>> share_pass(needs, max_rows=512, chunk=256)
    [(1, 1), (0, 256)]

    Args:
        needs: One entry a session.
        max_rows: Most rows in the pass.
        chunk: Most context tokens of one session in a pass.

    Returns:
        Index into `needs` and number of context tokens to run, for each session in the pass.
    """
    line = sorted(range(len(needs)), key=lambda i: (needs[i].num_context > chunk, needs[i].arrived))
    room = max_rows
    shares: list[tuple[int, int]] = []
    for index in line:
        need = needs[index]
        num_context = min(need.num_context, chunk)
        rows = num_context + (need.num_nodes if num_context == need.num_context else 0)
        if rows <= room or not shares:
            shares.append((index, num_context))
            room -= rows
    return shares
