"""How much memory a mode reads beside plain decoding, by counting passes (arXiv 2308.04623, table 1).

A pass reads its model's weights as served, embedding look-ups left out and a head counted once, and the cache
of the context. It is put down to its session as a whole, so the figure is that of one session: in a batch,
sessions share the reading of weights. Passes of a call that failed or came too late are not known, and not
counted; tables say how many steps went on without a drafter. An n-gram drafter has no passes and counts as 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.pipeline import TARGET_ORIGIN
from stagespec.v1.pipeline_pb2 import GetPipelineResponse
from stagespec.v1.stage_pb2 import StageInfo


@dataclass(frozen=True, slots=True)
class PassSize:
    """What one pass of a stage's model reads.

    Attributes:
        weight_bytes: Weights; 0 if the stage does not say.
        cache_bytes_per_token: Keys and values of one context token.
    """

    weight_bytes: int
    cache_bytes_per_token: int

    def of(self, num_passes: int, num_cache_rows: int) -> int:
        """Bytes that so many passes over so many rows of cache, all together, read."""
        return num_passes * self.weight_bytes + num_cache_rows * self.cache_bytes_per_token


def pass_sizes(pipeline: GetPipelineResponse) -> dict[str, PassSize]:
    """The size of a pass of each stage, by the names that `DecodeWork` has for them."""
    sizes = {stage.name: _size(stage.info) for stage in pipeline.drafters}
    return sizes | {TARGET_ORIGIN: _size(pipeline.verifier.info)}


def relative_traffic(entries: Iterable[Mapping[str, Any]], sizes: Mapping[str, PassSize]) -> float | None:
    """Bytes that all models read to decode, over those of plain decoding for the same tokens.

    The first step, which reads the prompt, is left out on both sides. Plain decoding is not run for it: its
    token at context length c reads the target's weights and c rows of cache.

    Args:
        entries: Records of generations, with `num_prompt_tokens`, `num_tokens` and `decode_work`.
        sizes: From `pass_sizes`.

    Returns:
        The ratio over all generations together; None if they have no tokens after the first step, or if a
        stage that ran passes does not say how large its model is.
    """
    spent = plain = 0
    for entry in entries:
        work = entry["decode_work"]
        for stage in work["stages"]:
            size = sizes.get(stage["name"])
            if stage["num_passes"] and (size is None or not size.weight_bytes):
                return None
            if size is not None:
                spent += size.of(stage["num_passes"], stage["num_cache_rows"])
        # Token number i was drawn at context length prompt + i; those of the first step are not counted.
        end = entry["num_prompt_tokens"] + entry["num_tokens"]
        contexts = range(end - work["num_tokens"], end)
        if contexts:
            plain += sizes[TARGET_ORIGIN].of(len(contexts), sum(contexts))
    return spent / plain if plain else None


def _size(info: StageInfo) -> PassSize:
    return PassSize(info.pass_weight_bytes, info.cache_bytes_per_token)
