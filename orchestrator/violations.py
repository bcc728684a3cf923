"""Collects everything that is wrong with a request, so that it is all said at once."""

import math
from collections.abc import Sequence

from stagespec.rpc import FieldViolation, invalid_argument

_MOST_REPORTED = 10
_LONGEST = 240
# A status travels in HTTP/2 trailers, which hold about 8 KB.


class Violations:
    """What was found wrong so far. Beyond ten faults only their number is reported."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []
        self._num_more = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str, description: str) -> None:
        """Notes one fault: the value, the limit, what to do."""
        if len(self._found) == _MOST_REPORTED:
            self._num_more += 1
            return
        if len(description) > _LONGEST:
            description = description[:_LONGEST] + "..."
        self._found.append(FieldViolation(field, description))

    def check_range(
        self, field: str, value: float, low: float, high: float, *, above_low: bool = False
    ) -> None:
        """Notes a number outside [low, high], or outside (low, high] if `above_low`. NaN always is."""
        if math.isnan(value) or not low <= value <= high or (above_low and value == low):
            limit = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            self.add(field, f"{value:g} is not {limit}")

    def check_minimum(self, field: str, value: int, low: int) -> None:
        """Notes a number below `low`."""
        if value < low:
            self.add(field, f"{value} is below {low}")

    def check_count(self, field: str, number: int, most: int) -> None:
        """Notes a list that is too long."""
        if number > most:
            self.add(field, f"{number} entries are more than {most}")

    def check_token_ids(self, field: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
        """Notes token ids outside the vocabulary, the first of them by index."""
        outside = [i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocabulary_size]
        if outside:
            first = outside[0]
            others = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
            limit = f"is not from 0 to {vocabulary_size - 1}{others}"
            self.add(f"{field}[{first}]", f"token id {token_ids[first]} {limit}")

    def raise_any(self) -> None:
        """Refuses the request if anything was noted.

        Raises:
            RpcError: INVALID_ARGUMENT with all of it.
        """
        if self._num_more:
            self._found.append(FieldViolation("request", f"{self._num_more} more fields are at fault"))
        if self._found:
            raise invalid_argument(self._found)
