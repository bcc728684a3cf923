"""A stage's books: counters, latency histograms, and a trace while one is being recorded."""

import bisect
import json
import threading
import time
from collections import deque

from stagespec.v1.stage_pb2 import GetStatsResponse, LatencyHistogram

UPPER_BOUNDS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1.0, 2.0, 5.0))
"""Upper bounds of the latency buckets in seconds: 10 microseconds to 50 seconds."""

MAX_TRACE_EVENTS = 200_000
"""A trace that nobody stops keeps its newest events only."""


class Stats:
    """Counters and latencies of one stage. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._trace: deque[dict[str, object]] | None = None

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter or gauge."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def record(self, seconds: dict[str, float]) -> None:
        """Books one request's durations by part, and draws them if a trace is running."""
        with self._lock:
            for part, value in seconds.items():
                buckets = self._buckets.setdefault(part, [0] * (len(UPPER_BOUNDS) + 1))
                buckets[bisect.bisect_left(UPPER_BOUNDS, value)] += 1
                self._sums[part] = self._sums.get(part, 0.0) + value
            if self._trace is not None:
                self._trace.extend(_draw(seconds))

    def start_trace(self) -> bool:
        """Begins a trace; False if one is running."""
        with self._lock:
            if self._trace is not None:
                return False
            self._trace = deque(maxlen=MAX_TRACE_EVENTS)
            return True

    def stop_trace(self) -> bytes | None:
        """Ends the trace and returns it in the Chrome trace format; None if none is running."""
        with self._lock:
            trace, self._trace = self._trace, None
        return None if trace is None else json.dumps({"traceEvents": list(trace)}).encode()

    def to_proto(self) -> GetStatsResponse:
        """The books as a message."""
        with self._lock:
            return GetStatsResponse(
                counters=self._counters,
                latencies={
                    part: LatencyHistogram(upper_bounds=UPPER_BOUNDS, counts=buckets, sum=self._sums[part])
                    for part, buckets in self._buckets.items()
                },
            )


def _draw(seconds: dict[str, float]) -> list[dict[str, object]]:
    """One request as complete events, its parts end to end and finishing now."""
    parts = {part: value for part, value in seconds.items() if part != "total"}
    begin = time.perf_counter() - sum(parts.values())
    events: list[dict[str, object]] = []
    for part, value in parts.items():
        events.append({"name": part, "ph": "X", "pid": 0, "tid": 0, "ts": begin * 1e6, "dur": value * 1e6})
        begin += value
    return events
