"""Runs the target's forward pass alone, as the stage would load it: how fast it is, and how exact."""

import random
import statistics
import time
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import torch

from deploy.bench.quality import Quality
from deploy.bench.roofline import target_work
from deploy.bench.worker import Actions
from deploy.model_libraries import quiet
from services.causal_lm.forward import Segment
from services.causal_lm.load import load
from services.causal_lm.rows import Rows
from services.target.settings import TargetSettings

_REPEATS = 3


@runtime_checkable
class LinearOnly(Protocol):
    """A forward pass that can run its linear layers alone."""

    def linear_only(self, num_rows: int) -> float:
        """Seconds that the linear layers of a pass of so many rows take."""


def start(**settings: Any) -> Actions:
    """Loads the target; the actions are `describe`, `fill`, `forward`, `linear` and `quality`.

    Args:
        settings: Fields of `TargetSettings`.
    """
    quiet()
    loaded = load(TargetSettings(**settings))
    chunk = TargetSettings(**settings).prefill_chunk
    rows: Rows | None = None

    def describe() -> dict[str, Any]:
        info, work = loaded.info, target_work(loaded.info)
        assert work is not None
        return {
            "weight_format": info.weight_format,
            "kernel": info.kernel,
            "max_context_length": info.max_context_length,
            "num_threads": info.num_threads,
            "work": asdict(work),
        }

    def fill(context: int) -> None:
        """Computes a context that the passes then attend to."""
        nonlocal rows
        rows = loaded.new_rows()
        draw = random.Random(context)
        while len(rows) < context:
            size = min(chunk, context - len(rows))
            for _ in range(size):
                rows.add(len(rows) - 1, draw.randrange(loaded.info.vocabulary_size))
            rows.grow_path(len(rows))
            loaded.forward([Segment(rows, size, [])])

    def forward(num_rows: int) -> float:
        """Median seconds of a pass: the last context token and a binary tree of drafts behind it."""
        assert rows is not None, "fill comes first"
        spent = []
        # The first one wakes the threads.
        for _ in range(1 + _REPEATS):
            context = len(rows)
            nodes = [rows.add(context - 1, 0)]
            rows.grow_path(context + 1)
            for node in range(1, num_rows):
                nodes.append(rows.add(nodes[(node - 1) // 2], node % 2))
            begin = time.perf_counter()
            loaded.forward([Segment(rows, num_rows, range(num_rows))])
            if loaded.info.device.startswith("cuda"):
                torch.cuda.synchronize(loaded.info.device)
            spent.append(time.perf_counter() - begin)
            rows.truncate(context)
        return statistics.median(spent[1:])

    def linear(num_rows: int) -> float | None:
        run = loaded.run
        if not isinstance(run, LinearOnly):
            return None
        return statistics.median(run.linear_only(num_rows) for _ in range(_REPEATS))

    quality = Quality(loaded, settings["model"])
    return {
        "describe": describe,
        "fill": fill,
        "forward": forward,
        "linear": linear,
        "quality": quality.measure,
    }
