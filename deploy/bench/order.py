"""In which order ways take their turns, so that none is always first or always behind the same other one."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turn_order(items: Sequence[T], turn: int) -> list[T]:
    """The order for one turn.

    The start moves on by one every other turn, and every second turn runs backwards. In any 2 n turns from an
    even one, each of n items stands twice at each place, and of two neighbours neither is first more often.

    Args:
        items: What takes turns.
        turn: Number of the turn, from 0.
    """
    if not items:
        return []
    start = turn // 2 % len(items)
    rotated = [*items[start:], *items[:start]]
    return rotated if turn % 2 == 0 else rotated[::-1]
