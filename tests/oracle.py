"""The draw of one token as the contract words it: slow, plain Python, in float64.

It is what fast samplers are compared with, and what the fake verifier draws with.
"""

import math
from collections.abc import Sequence

import numpy as np

from stagespec.noise import gumbel
from stagespec.v1.sampling_pb2 import SamplingParams


def oracle_draw(logits: list[float], sampling: SamplingParams, context: Sequence[int], position: int) -> int:
    """The token at `position`, which follows `context`; ties go to the lower id."""
    scores = _cut_and_scaled(logits, sampling, context)
    if sampling.temperature > 0:
        left = [token_id for token_id, score in enumerate(scores) if score > -math.inf]
        noise = gumbel(sampling.seed, position, np.array(left, dtype=np.int64))
        for token_id, g in zip(left, noise, strict=True):
            scores[token_id] += float(g)
    best = max(scores)
    return scores.index(best)


def oracle_distribution(logits: list[float], sampling: SamplingParams, context: Sequence[int]) -> list[float]:
    """The distribution that `oracle_draw` draws from, over seeds."""
    scores = _cut_and_scaled(logits, sampling, context)
    if sampling.temperature == 0:
        first = scores.index(max(scores))
        return [float(token_id == first) for token_id in range(len(scores))]
    return _softmax(scores)


def _cut_and_scaled(logits: list[float], sampling: SamplingParams, context: Sequence[int]) -> list[float]:
    """Processed scores, with -inf for every token that cannot be drawn."""
    scores = list(logits)
    generated = list(context[sampling.prompt_length :])

    if sampling.HasField("repetition_penalty"):
        for token_id in set(context):
            score = scores[token_id]
            penalty = sampling.repetition_penalty
            scores[token_id] = score / penalty if score > 0 else score * penalty
    for token_id in set(generated):
        scores[token_id] -= sampling.frequency_penalty * generated.count(token_id)
        scores[token_id] -= sampling.presence_penalty
    for token_id, bias in sampling.logit_bias.items():
        scores[token_id] += bias
    if len(generated) < sampling.min_tokens:
        for token_id in sampling.end_token_ids:
            scores[token_id] = -math.inf
    if sampling.temperature == 0:
        return scores

    best = max(scores)
    scores = [(score - best) / sampling.temperature for score in scores]
    ranked = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if sampling.HasField("top_k"):
        for token_id in ranked[sampling.top_k :]:
            scores[token_id] = -math.inf
    if sampling.HasField("top_p"):
        probabilities, total = _softmax(scores), 0.0
        for token_id in ranked:
            if total >= sampling.top_p:
                scores[token_id] = -math.inf
            total += probabilities[token_id]
    if sampling.HasField("min_p"):
        probabilities = _softmax(scores)
        floor = sampling.min_p * max(probabilities)
        for token_id, probability in enumerate(probabilities):
            if probability < floor:
                scores[token_id] = -math.inf
    return scores


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
