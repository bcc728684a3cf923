"""Collects what a target writes for many prompts. It does not know where they come from or what for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.causal_lm.load import LoadedModel
from services.causal_lm.sample import Prompted, continuations
from services.training.collection import Collection
from stagespec.v1.sampling_pb2 import SamplingParams

PART = 64
"""Prompts of one part: what is lost when a run is cut short."""

GREEDY = SamplingParams(temperature=0.0)


def plan(
    prompts: Sequence[Sequence[int]],
    greedy_share: float,
    seed: int,
    temperature: float = 1.0,
    top_k: int | None = 50,
) -> list[Prompted]:
    """How each prompt is continued: a fixed share greedily, the others sampled with seeds of their own."""

    def sampled(seed: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, top_k=top_k, seed=seed)

    planned = []
    for key, token_ids in enumerate(prompts):
        greedy = int((key + 1) * greedy_share) > int(key * greedy_share)
        planned.append(Prompted(key, tuple(token_ids), GREEDY if greedy else sampled(seed + key)))
    return planned


def collect(
    loaded: LoadedModel,
    prompts: Sequence[Prompted],
    folder: Path,
    settings: dict[str, Any],
    *,
    batch_size: int,
    max_tokens: int,
    report: Callable[[int, int, int], None],
) -> None:
    """Collects all parts that are missing.

    Args:
        loaded: The target.
        prompts: What to continue.
        folder: Where the collection is.
        settings: What its content depends on beside these arguments.
        batch_size: Prompts that are continued at once.
        max_tokens: Most tokens to draw for each.
        report: Told after each part how many there are, how many are complete, and tokens drawn by this run.

    Raises:
        CollectionError: The folder has a collection with other settings.
        ValueError: There are fewer prompts than a batch holds.
    """
    if len(prompts) < batch_size:
        raise ValueError(
            f"there are {len(prompts)} prompts and a batch has {batch_size}; give more, or lower --batch-size"
        )
    info = loaded.info
    whole = settings | {
        "model": info.model,
        "tokenizer_hash": info.tokenizer_hash,
        "vocabulary_size": info.vocabulary_size,
        "hidden_size": loaded.hidden_size,
        "weight_format": info.weight_format,
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
    }
    collection = Collection(folder, whole)
    num_parts = -(-len(prompts) // PART)
    num_drawn = 0
    missing = [part for part in range(num_parts) if not collection.has(part)]
    num_complete = num_parts - len(missing)
    waiting = {part: min(PART, len(prompts) - part * PART) for part in missing}
    found: dict[int, list[Any]] = {part: [] for part in missing}
    # All missing parts run as one stream of prompts, so that no place in a batch is empty between parts.
    stream = (prompt for part in missing for prompt in prompts[part * PART : (part + 1) * PART])
    for continuation in continuations(loaded, stream, batch_size=batch_size, max_tokens=max_tokens):
        part = continuation.key // PART
        found[part].append(continuation)
        num_drawn += len(continuation.token_ids) - continuation.prompt_length
        if len(found[part]) == waiting[part]:
            collection.write(part, found.pop(part))
            num_complete += 1
            report(num_parts, num_complete, num_drawn)
