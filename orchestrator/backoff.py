"""How long to stay away from what failed."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with a cap, and with jitter, so that requests don't come back in step.

    Attributes:
        first_s: Seconds after the first failure.
        most_s: Seconds after any failure.
    """

    first_s: float
    most_s: float

    def delay(self, num_failures: int) -> float:
        """Seconds to wait after so many failures in a row, at least 1."""
        full = min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 32))
        return full * random.uniform(0.5, 1.0)
