"""What the target computed, on its way from the verifier to the drafters that asked for it."""

from collections import deque
from collections.abc import Iterable, Sequence

from stagespec.v1.observation_pb2 import ElementType, Observation, ObservationRequest

MAX_BYTES = 8 * 1024 * 1024
"""Most that waits for one drafter: half of what a message between stages may hold."""

MAX_CANDIDATES = 64
"""Most candidates that a drafter gets for each node."""


def combine(wishes: Iterable[ObservationRequest]) -> ObservationRequest:
    """One request that serves all drafters: the most candidates, in a number format that fits all.

    Where drafters want different formats they get float32, which any of them can be rounded from. A wish that
    nobody could grant is left out: what a drafter says must not make the verifier refuse the request.
    """
    wishes = list(wishes)
    formats = {wish.hidden_states for wish in wishes if wish.hidden_states in ElementType.values()}
    formats.discard(ElementType.ELEMENT_TYPE_UNSPECIFIED)
    most = max((wish.num_candidates for wish in wishes), default=0)
    combined = ObservationRequest(num_candidates=min(max(most, 0), MAX_CANDIDATES))
    if formats:
        combined.hidden_states = formats.pop() if len(formats) == 1 else ElementType.ELEMENT_TYPE_FLOAT32
    return combined


class ObservationBuffer:
    """Observations that wait for the next request to one drafter.

    Args:
        wish: What the drafter asked for; the rest is left out.
        max_bytes: Most to keep. The oldest go first: a drafter works with what it has.
    """

    def __init__(self, wish: ObservationRequest, max_bytes: int = MAX_BYTES) -> None:
        self._wish = wish
        self._max_bytes = max_bytes
        self._waiting: deque[Observation] = deque()
        self._num_bytes = 0

    def put(self, observations: Sequence[Observation]) -> None:
        """Keeps what the drafter asked for."""
        for observation in observations:
            kept = self._select(observation)
            if kept.ByteSize() == 0:
                continue
            self._waiting.append(kept)
            self._num_bytes += kept.ByteSize()
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._waiting.popleft().ByteSize()

    def take(self) -> list[Observation]:
        """Hands out what waits, oldest first, and keeps nothing."""
        taken = list(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return taken

    def _select(self, observation: Observation) -> Observation:
        kept = Observation()
        if self._wish.hidden_states and observation.hidden_states:
            kept.first_position = observation.first_position
            kept.num_positions = observation.num_positions
            kept.element_type = observation.element_type
            kept.hidden_states = observation.hidden_states
        if self._wish.num_candidates:
            kept.candidates.extend(observation.candidates)
        return kept
