"""Numbers of rows that a pass of fixed shapes comes in; others are filled up to the next one.

It does not know what the rows are. A pass with more rows than the largest has shapes of its own.
"""

from bisect import bisect_left

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Close enough that filling up costs little, few enough that all of them are captured in a moment."""


def bucket(num_rows: int) -> int | None:
    """The smallest size that holds so many rows, or None if there is none.

    >>> [bucket(num_rows) for num_rows in (1, 3, 8, 9, 256, 257)]
    [1, 4, 8, 16, 256, None]
    """
    place = bisect_left(SIZES, num_rows)
    return SIZES[place] if place < len(SIZES) else None
