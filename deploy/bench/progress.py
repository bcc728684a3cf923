"""How far a run is, and about how long it will still take."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence

_SILENT_S = 5.0


class Progress:
    """Tells now and then how many units are done and how long the others will take.

    A kind of unit that was measured before is taken to last as long as it did on average; another, as long as
    the average unit.

    Args:
        note: Told a line at a time.
        kinds: The kind of each unit that is to be done.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        kinds: Sequence[Hashable],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note = note
        self._left = Counter(kinds)
        self._total = len(kinds)
        self._spent: dict[Hashable, list[float]] = defaultdict(list)
        self._clock = clock
        self._begun = self._said = clock()

    def begin(self) -> None:
        """A unit begins now; what came before it is not counted."""
        self._begun = self._clock()

    def done(self, kind: Hashable) -> None:
        """The unit that began last has been done."""
        now = self._clock()
        self._left[kind] -= 1
        self._spent[kind].append(now - self._begun)
        num_done = self._total - self._left.total()
        if now - self._said >= _SILENT_S or num_done == self._total:
            self._said = now
            self._note(f"  {num_done} of {self._total}, {_duration(self.seconds_left())} left")

    def drop(self, kind: Hashable) -> None:
        """A unit will not be done after all."""
        self._left[kind] -= 1
        self._total -= 1

    def seconds_left(self) -> float:
        """The estimate; 0 while nothing has been done."""
        everything = [seconds for spent in self._spent.values() for seconds in spent]
        if not everything:
            return 0.0
        average = sum(everything) / len(everything)
        means = {kind: sum(spent) / len(spent) for kind, spent in self._spent.items()}
        return sum(count * means.get(kind, average) for kind, count in self._left.items())


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"
