"""What a draft model expects after a node: likely children, and how likely the target is to draw each.

At temperature 0 the draft's own probability is the estimate. Above it the noise of the position is known, so
candidates are ranked by the draft's perturbed scores, which is what makes draft and target agree; the
estimate is a softmax over those. Where an earlier drafter has guessed children, its estimates are mixed in.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from services.calibration import Calibration
from services.sampling import History, Ids, perturb, process
from stagespec.rpc import RpcError
from stagespec.v1.sampling_pb2 import SamplingParams

INITIAL_TRUST = 0.5
TRUST_LIMITS = (0.05, 0.95)
LEARNING_RATE = 0.05
FLOOR = 1e-3
"""What a token that nobody expected counts as, so that both lose alike."""

NUM_RANKED = 256
"""Tokens whose noise is looked at. The others almost never win and would cost most of the time."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Children of one node, most likely first.

    Attributes:
        token_ids: Distinct tokens.
        log_probs: Estimated log probability that the target draws each, given the path and the noise.
        own: The draft model's part in that, before the guesses were mixed in, by token.
        guesses: The guesses that were mixed in, by token.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    own: Mapping[int, float]
    guesses: Mapping[int, float]


NO_CANDIDATES = Candidates((), (), {}, {})


@dataclass(frozen=True, slots=True)
class Place:
    """Where candidates are wanted.

    Attributes:
        path: Drafted tokens from the context to the node, inclusive.
        position: Position of the children.
        guesses: Children that an earlier drafter guessed, with its log probabilities. They are scored however
            unlikely the draft model finds them.
    """

    path: tuple[int, ...]
    position: int
    guesses: Mapping[int, float]


def rank(
    logits: Tensor,
    places: Sequence[Place],
    sampling: SamplingParams,
    history: History,
    trust: float,
    count: int,
    token_ids: Ids | None = None,
) -> list[Candidates]:
    """Finds the candidates of several nodes.

    Args:
        logits: The draft's raw logits after each node. [num_places, num_scored]
        places: The nodes.
        sampling: The request's parameters: advice, followed so far as the ranked tokens allow.
        history: Tokens of the context.
        trust: Weight of the guesses in the mixture, from 0 to 1.
        count: How many of the likeliest to return for each, guesses not counted.
        token_ids: The tokens that the logits are of, rising; None where a token's id is its place. Of guesses
            beyond them nothing is known but what their drafter says. [num_scored]

    Returns:
        One entry a place. Where the logits cannot be used there are no candidates: a draft may be empty.
    """
    top_logits, top_ids = (t.cpu().numpy() for t in logits.topk(min(NUM_RANKED, logits.shape[1])))
    totals = torch.logsumexp(logits, dim=-1).cpu().numpy()
    found = []
    for index, place in enumerate(places):
        places_of, values = top_ids[index], top_logits[index]
        guessed = np.setdiff1d(_places(token_ids, place.guesses, logits.shape[1]), places_of)
        if len(guessed):
            places_of = np.concatenate([places_of, guessed])
            values = np.concatenate([values, logits[index, guessed].cpu().numpy()])
        ids = places_of if token_ids is None else token_ids[places_of]
        order = np.argsort(ids)
        try:
            processed = process(ids[order], values[order], sampling, history.extended(place.path))
        except RpcError:
            found.append(NO_CANDIDATES)
            continue
        perturbed = perturb(processed, sampling, place.position)
        total = totals[index] if sampling.temperature == 0.0 else np.logaddexp.reduce(perturbed.scores)
        log_probs = np.minimum(perturbed.scores - total, 0.0)
        best = np.argsort(-log_probs, kind="stable")[:count]
        own = {int(perturbed.ids[i]): float(log_probs[i]) for i in best if np.isfinite(log_probs[i])}
        for i in np.flatnonzero(np.isin(perturbed.ids, list(place.guesses))):
            own[int(perturbed.ids[i])] = float(log_probs[i])
        found.append(_mixed(own, place.guesses, trust))
    return found


def _mixed(own: Mapping[int, float], guesses: Mapping[int, float], trust: float) -> Candidates:
    """The mixture of the draft's estimates and the guesses, where there are any."""
    weight = trust if guesses else 0.0
    mixed = {
        token_id: _log((1.0 - weight) * _exp(own.get(token_id)) + weight * _exp(guesses.get(token_id)))
        for token_id in {**own, **guesses}
    }
    ranked = sorted((t for t in mixed if mixed[t] > -math.inf), key=lambda t: (-mixed[t], t))
    return Candidates(tuple(ranked), tuple(mixed[t] for t in ranked), own, guesses)


def update_trust(trust: float, candidates: Candidates, token_id: int) -> float:
    """Moves the weight of the guesses towards whoever foresaw a committed token: one step of on-line EM.

    Args:
        trust: The present weight.
        candidates: What was expected at the token's place.
        token_id: What the target drew.

    Returns:
        The new weight, within `TRUST_LIMITS`. Only places with guesses teach anything.
    """
    if not candidates.guesses:
        return trust
    guessed = trust * max(_exp(candidates.guesses.get(token_id)), FLOOR)
    own = (1.0 - trust) * max(_exp(candidates.own.get(token_id)), FLOOR)
    moved = trust + LEARNING_RATE * (guessed / (guessed + own) - trust)
    return min(max(moved, TRUST_LIMITS[0]), TRUST_LIMITS[1])


def calibrated(candidates: Candidates, calibration: Calibration) -> Candidates:
    """The same children with estimates that experience has corrected."""
    log_probs = (calibration.log_prob(p, rank) for rank, p in enumerate(candidates.log_probs))
    return replace(candidates, log_probs=tuple(log_probs))


def _places(token_ids: Ids | None, wanted: Iterable[int], num_scored: int) -> Ids:
    """Where tokens stand among those that were scored; those that do not are left out."""
    ids = np.fromiter(wanted, dtype=np.int64)
    if token_ids is None:
        return ids[ids < num_scored]
    at = np.minimum(np.searchsorted(token_ids, ids), len(token_ids) - 1)
    found: Ids = at[token_ids[at] == ids]
    return found


def _exp(log_prob: float | None) -> float:
    return 0.0 if log_prob is None else math.exp(log_prob)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0.0 else -math.inf
