"""The one draw per position: a request's processors, the shared noise, and the choice.

Pure functions of logits, parameters and the token path. They do not know trees or models. Processors run in
the order that sampling.proto fixes, and at every cut and tie the lower token id comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt

from stagespec.noise import gumbel
from stagespec.rpc import RpcError
from stagespec.v1.sampling_pb2 import SamplingParams
from stagespec.v1.verifier_pb2 import TokenLogprobs

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

NOISE_RANGE = 26.1
"""A score this far below the best cannot win: 32-bit noise spans -3.13 to 22.87."""


class History:
    """How often each token occurs on a path: what the penalties need, kept only if there are any."""

    def __init__(self, sampling: SamplingParams, context: Sequence[int]) -> None:
        """Counts a context.

        Args:
            sampling: The request's parameters.
            context: Prompt and committed tokens.
        """
        self.num_generated = len(context) - sampling.prompt_length
        self._repetition = _unless(sampling, "repetition_penalty", 1.0)
        self._frequency = _unless(sampling, "frequency_penalty", 0.0)
        self._presence = _unless(sampling, "presence_penalty", 0.0)
        self._seen: set[int] = set(context) if self._repetition is not None else set()
        self._generated: dict[int, int] = {}
        if self._frequency is not None or self._presence is not None:
            for token_id in context[sampling.prompt_length :]:
                self._generated[token_id] = self._generated.get(token_id, 0) + 1

    def extended(self, token_ids: Sequence[int]) -> "History":
        """A copy with some more generated tokens on the path."""
        copy = object.__new__(History)
        copy.num_generated = self.num_generated
        copy._repetition, copy._frequency, copy._presence = self._repetition, self._frequency, self._presence
        copy._seen, copy._generated = set(self._seen), dict(self._generated)
        for token_id in token_ids:
            copy.append(token_id)
        return copy

    def append(self, token_id: int) -> None:
        """Goes one generated token further down the path."""
        self.num_generated += 1
        if self._repetition is not None:
            self._seen.add(token_id)
        if self._frequency is not None or self._presence is not None:
            self._generated[token_id] = self._generated.get(token_id, 0) + 1

    def changes(self, sampling: SamplingParams) -> bool:
        """Whether anything is done to the logits of the next token before temperature and cuts."""
        penalties = (self._repetition, self._frequency, self._presence)
        waits = self.num_generated < sampling.min_tokens
        return waits or bool(sampling.logit_bias) or any(penalty is not None for penalty in penalties)

    def penalise(self, ids: Ids, scores: Scores) -> None:
        """Applies the penalties in place, to tokens in rising order."""
        if self._repetition is not None:
            at = _positions(ids, sorted(self._seen))
            scores[at] = np.where(
                scores[at] > 0, scores[at] / self._repetition, scores[at] * self._repetition
            )
        if self._generated:
            tokens = sorted(self._generated)
            present = np.isin(tokens, ids, assume_unique=True)
            counts = np.array([self._generated[token_id] for token_id in tokens], dtype=np.float64)[present]
            at = _positions(ids, tokens)
            if self._frequency is not None:
                scores[at] -= self._frequency * counts
            if self._presence is not None:
                scores[at] -= self._presence


@dataclass(frozen=True, slots=True)
class Processed:
    """What the processors left.

    Attributes:
        ids: Surviving tokens in rising order. [num_tokens]
        scores: Their logits, processed and, above temperature 0, relative to the best and divided by it.
            [num_tokens]
    """

    ids: Ids
    scores: Scores


def process(
    ids: Ids, logits: npt.NDArray[np.float32], sampling: SamplingParams, history: History
) -> Processed:
    """Runs a request's processors over the logits of one position.

    Args:
        ids: Tokens in rising order: the whole vocabulary, or a part of it where only advice is wanted. [n]
        logits: Raw logits of these tokens. [n]
        sampling: The request's parameters.
        history: Tokens on the path to this position.

    Returns:
        The survivors. At temperature 0 nothing is cut, since only the best one matters.

    Raises:
        RpcError: INTERNAL with reason NUMERICAL_ERROR if a logit is NaN or none is above minus infinity.
    """
    scores = logits.astype(np.float64)
    history.penalise(ids, scores)
    if sampling.logit_bias:
        biased = sorted(sampling.logit_bias)
        present = np.isin(biased, ids, assume_unique=True)
        bias = np.array([sampling.logit_bias[token_id] for token_id in biased])[present]
        scores[_positions(ids, biased)] += bias
    if history.num_generated < sampling.min_tokens:
        scores[_positions(ids, sorted(set(sampling.end_token_ids)))] = -np.inf
    best = scores.max(initial=-np.inf)
    if not np.isfinite(best):  # NaN spreads through max
        message = "the model's logits cannot be sampled from (NaN, infinite or all banned); try again"
        raise RpcError(grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR", message)
    if sampling.temperature == 0.0:
        return Processed(ids, scores)
    # Relative to the best, so that a tiny temperature separates the scores instead of making all infinite.
    with np.errstate(over="ignore"):
        scores = (scores - best) / sampling.temperature
    if sampling.HasField("top_k") and sampling.top_k < len(ids):
        ids, scores = _take(ids, scores, _highest(scores, sampling.top_k))
    if sampling.HasField("top_p") and sampling.top_p < 1.0:
        ids, scores = _take(ids, scores, _nucleus(scores, sampling.top_p))
    if sampling.HasField("min_p") and sampling.min_p > 0.0:
        ids, scores = _take(ids, scores, np.flatnonzero(scores >= np.log(sampling.min_p)))
    return Processed(ids, scores)


def perturb(processed: Processed, sampling: SamplingParams, position: int) -> Processed:
    """Adds the shared noise, for the tokens that can still win. At temperature 0 there is none."""
    if sampling.temperature == 0.0:
        return processed
    can_win = processed.scores >= processed.scores.max() - NOISE_RANGE
    ids, scores = processed.ids[can_win], processed.scores[can_win]
    return Processed(ids, scores + gumbel(sampling.seed, position, ids))


def draw(
    ids: Ids,
    logits: npt.NDArray[np.float32],
    sampling: SamplingParams,
    history: History,
    position: int,
) -> int:
    """Draws the token at a position.

    argmax over the survivors of (score + Gumbel noise) is an exact draw from softmax(score), and a pure
    function of (logits, parameters, seed, path), so that whoever asks gets the same token.

    Args:
        ids: The vocabulary, in rising order. [vocabulary_size]
        logits: Raw logits. [vocabulary_size]
        sampling: The request's parameters.
        history: Tokens on the path to this position.
        position: Index of the token that is drawn.

    Returns:
        The token id.

    Raises:
        RpcError: INTERNAL with reason NUMERICAL_ERROR, see `process`.
    """
    if sampling.temperature == 0.0 and not history.changes(sampling):
        best = int(np.argmax(logits))  # the first of equals, or of NaN
        if np.isfinite(logits[best]):
            return int(ids[best])
    perturbed = perturb(process(ids, logits, sampling, history), sampling, position)
    return int(perturbed.ids[np.argmax(perturbed.scores)])


def logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Raw log-softmax of one position's logits, for the drawn token and the likeliest ones."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top = _by_falling_score(values, _highest(values, num_top)) if num_top else np.empty(0, dtype=np.int64)
    return TokenLogprobs(
        log_prob=values[token_id], top_token_ids=top.tolist(), top_log_probs=values[top].tolist()
    )


def _unless(sampling: SamplingParams, name: str, neutral: float) -> float | None:
    """A penalty's value, or None if it changes nothing."""
    value: float = getattr(sampling, name)
    return value if sampling.HasField(name) and value != neutral else None  # type: ignore[arg-type]


def _positions(ids: Ids, wanted: Sequence[int]) -> Ids:
    """Where those of `wanted` stand that are among `ids`; both in rising order."""
    tokens = np.asarray(wanted, dtype=np.int64)
    at = np.searchsorted(ids, tokens)
    at_most = np.minimum(at, len(ids) - 1)
    found: Ids = at_most[ids[at_most] == tokens]
    return found


def _take(ids: Ids, scores: Scores, kept: Ids) -> tuple[Ids, Scores]:
    return ids[kept], scores[kept]


def _highest(scores: Scores, count: int) -> Ids:
    """Indices, in rising order, of the `count` highest scores; at a tie the lower index."""
    if count >= len(scores):
        return np.arange(len(scores))
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _by_falling_score(scores: Scores, indices: Ids) -> Ids:
    """`indices` (in rising order) sorted by falling score; at a tie the lower index first."""
    return indices[np.argsort(-scores[indices], kind="stable")]


def _nucleus(scores: Scores, top_p: float) -> Ids:
    """Indices, in rising order, of the smallest set of likeliest tokens whose probability reaches `top_p`.

    Only as many of the highest scores are sorted as the set needs.
    """
    weights = np.exp(scores - scores.max())
    wanted = top_p * weights.sum()
    count = 256
    while True:
        ranked = _by_falling_score(scores, _highest(scores, count))
        cumulative = np.cumsum(weights[ranked])
        if cumulative[-1] >= wanted or count >= len(scores):
            size = int(np.searchsorted(cumulative, wanted)) + 1
            return np.sort(ranked[:size])
        count *= 8
