"""What a draft model expects after a node: likely children, and how likely the target is to draw each.

At temperature 0 the draft's own probability is the estimate. Above it the noise of the position is known, so
candidates are ranked by the draft's perturbed scores, which is what makes draft and target agree; the
estimate is a softmax over those.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.sampling import History, perturb, process
from stagespec.rpc import RpcError
from stagespec.v1.sampling_pb2 import SamplingParams

NUM_RANKED = 256
"""Tokens whose noise is looked at. The others almost never win and would cost most of the time."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Children of one node, most likely first.

    Attributes:
        token_ids: Distinct tokens.
        log_probs: Estimated log probability that the target draws each, given the path and the noise.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


NO_CANDIDATES = Candidates((), ())


@dataclass(frozen=True, slots=True)
class Place:
    """Where candidates are wanted.

    Attributes:
        path: Drafted tokens from the context to the node, inclusive.
        position: Position of the children.
        guessed: Children that another drafter guessed: they are scored however unlikely.
    """

    path: tuple[int, ...]
    position: int
    guessed: tuple[int, ...]


def rank(
    logits: Tensor, places: Sequence[Place], sampling: SamplingParams, history: History, count: int
) -> list[Candidates]:
    """Finds the candidates of several nodes.

    Args:
        logits: The draft's raw logits after each node. [num_places, vocab]
        places: The nodes.
        sampling: The request's parameters: advice, followed so far as the ranked tokens allow.
        history: Tokens of the context.
        count: How many of the likeliest to return for each, guessed ones not counted.

    Returns:
        One entry a place. Where the logits cannot be used there are no candidates: a draft may be empty.
    """
    top_logits, top_ids = (t.cpu().numpy() for t in logits.topk(min(NUM_RANKED, logits.shape[1])))
    totals = torch.logsumexp(logits, dim=-1).cpu().numpy()
    found = []
    for index, place in enumerate(places):
        guessed = np.setdiff1d(np.array(place.guessed, dtype=np.int64), top_ids[index])
        ids = np.concatenate([top_ids[index], guessed])
        values = np.concatenate([top_logits[index], logits[index, guessed].cpu().numpy()])
        order = np.argsort(ids)
        path = history.extended(place.path)
        try:
            processed = process(ids[order], values[order], sampling, path)
        except RpcError:
            found.append(NO_CANDIDATES)
            continue
        perturbed = perturb(processed, sampling, place.position)
        total = totals[index] if sampling.temperature == 0.0 else np.logaddexp.reduce(perturbed.scores)
        log_probs = np.minimum(perturbed.scores - total, 0.0)
        best = np.argsort(-log_probs, kind="stable")
        kept = [i for rank, i in enumerate(best) if rank < count or perturbed.ids[i] in place.guessed]
        kept = [i for i in kept if np.isfinite(log_probs[i])]
        found.append(Candidates(tuple(perturbed.ids[kept].tolist()), tuple(log_probs[kept].tolist())))
    return found
