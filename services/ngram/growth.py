"""Grows a draft best-first: the most probable path is extended first, from the hint's nodes as from the root.

It knows budgets, trees and the shared noise, not where probabilities come from.
"""

import heapq
import math
from collections import Counter

import numpy as np

from services.calibration import NUM_TAUGHT, Calibration
from services.engine import ProposeTask
from services.ngram.katz import Floats
from services.ngram.mixture import Candidates, Mixture
from services.ngram.session import Drafted, NgramSession
from stagespec.noise import gumbel
from stagespec.siblings import likeliest_children
from stagespec.tree import ROOT, DraftTree, most_probable
from stagespec.v1.sampling_pb2 import SamplingParams

MAX_CHILDREN = 16
"""Children considered for one node."""

MAX_PROBABILITY = 0.95
"""No estimate is surer than this: the model behind the counts is not the target."""

_REST_NOISE = 1.6
"""Noise that all other tokens together count with: about log(mean of exp(g)) over a hundred of like size."""

_EXPAND = -1  # in place of a token: the entry stands for all children of the node


def grow(
    mixture: Mixture, session: NgramSession, task: ProposeTask, calibration: Calibration | None = None
) -> DraftTree:
    """Extends the hint of a task.

    Every hint node is kept as it is, but for what the budget cuts. A node is added while there is room for it
    and among its siblings, and its path's estimated probability is at least the node's price.

    Args:
        mixture: The model.
        session: The session, its context up to date. It remembers the draft, for `learn`.
        task: What is asked.
        calibration: Corrects the estimates; None to take them as they are.

    Returns:
        The draft. Estimates are those of `estimate`, calibrated.
    """
    budget = task.budget
    calibration = calibration or Calibration()
    hint = _cut(task.hint, budget.max_nodes, budget.max_depth, budget.max_children)
    token_ids, parents = list(hint.token_ids), list(hint.parents)
    log_probs, owners = list(hint.log_probs), list(hint.drafter_indices)
    paths, depths = hint.path_log_probs, hint.depths
    known = {(parent, token_id) for parent, token_id in zip(parents, token_ids, strict=True)}
    num_children = Counter(parents)
    guesses = dict[int, list[tuple[int, float]]]()
    floor = math.log(budget.node_price) if budget.node_price > 0.0 else -math.inf
    tail = session.last(mixture.reach)

    # Entries: (-log probability of the path, number, parent, token, log probability of the token). A node's
    # children cannot be more probable than its own path, so looking them up waits until that is the best.
    entries = [(0.0, 0, ROOT, _EXPAND, 0.0)]
    entries += [(-path, 1 + node, node, _EXPAND, 0.0) for node, path in enumerate(paths)]
    number = len(entries)
    heapq.heapify(entries)
    while entries and len(token_ids) < budget.max_nodes:
        cost, _, parent, token_id, log_prob = heapq.heappop(entries)
        if -cost < floor:
            break
        depth = 0 if parent == ROOT else depths[parent] + 1
        if depth >= budget.max_depth:
            continue
        if token_id == _EXPAND:
            suffix = (tail + _path_tokens(token_ids, parents, parent))[-mixture.reach :]
            candidates = mixture.candidates(session, suffix, MAX_CHILDREN)
            estimates = estimate(candidates, task.sampling, len(session) + depth)
            order = np.argsort(-estimates, kind="stable")  # the noise may have changed it
            children = list(zip(candidates.token_ids[order].tolist(), estimates[order].tolist(), strict=True))
            guesses[parent] = children[:NUM_TAUGHT]
            for rank, (child, guess) in enumerate(children):
                if (parent, child) not in known:
                    child_log_prob = calibration.log_prob(guess, rank)
                    heapq.heappush(entries, (cost - child_log_prob, number, parent, child, child_log_prob))
                    number += 1
            continue
        # The likeliest siblings come out of the heap first.
        if budget.max_children and num_children[parent] >= budget.max_children:
            continue
        num_children[parent] += 1
        node = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        log_probs.append(log_prob)
        owners.append(task.drafter_index)
        depths.append(depth)
        heapq.heappush(entries, (cost, number, node, _EXPAND, 0.0))
        number += 1
    draft = DraftTree(tuple(token_ids), tuple(parents), tuple(log_probs), tuple(owners))
    session.drafted = Drafted(len(session), task.sampling.temperature > 0.0, draft, guesses)
    return draft


def learn(calibration: Calibration, session: NgramSession) -> None:
    """Tells a calibration which of the session's last guesses came true, and forgets them.

    Guesses count at the places that the tokens lead to which the context has gained since, whether they were
    worth a node or not: else what is once thought too little of would never be thought better of.
    """
    drafted = session.drafted
    if drafted is None:
        return
    session.drafted = None
    children = drafted.draft.children()
    node: int | None = ROOT
    for drawn in session.since(drafted.length):
        if node is None:
            break
        calibration.learn_place(drafted.guesses.get(node, ()), drawn)
        node = children.get(node, {}).get(drawn)


def estimate(candidates: Candidates, sampling: SamplingParams, position: int) -> Floats:
    """Estimated log probability that the target draws each candidate, given the noise at `position`.

    Greedy: the model's own probability p. At temperature T > 0 the target draws the largest log(P) / T + g
    for its own P, which p only approximates. If the errors of log(p) are taken as independent standard Gumbel
    numbers, candidate v has the largest log(P) + T g with probability softmax(log(p) + T g)[v]. As T falls to
    0 this becomes the greedy rule. All other tokens together stand as one more candidate, with their mass and
    a typical noise that fits temperatures up to about 1; far above, estimates are too high.

    Args:
        candidates: Tokens and model probabilities. [num_candidates]
        sampling: Temperature and seed.
        position: Index of the token to be drawn.

    Returns:
        Natural logarithms, finite and below 0. [num_candidates]
    """
    scores = np.log(candidates.probabilities)
    temperature = sampling.temperature
    if temperature > 0.0 and len(scores):
        scores = scores + temperature * gumbel(sampling.seed, position, candidates.token_ids)
        rest = max(1.0 - float(candidates.probabilities.sum()), 1e-12)
        rest_score = math.log(rest) + temperature * _REST_NOISE
        top = max(float(scores.max()), rest_score)
        scores = scores - top - math.log(np.exp(scores - top).sum() + math.exp(rest_score - top))
    return np.minimum(scores, math.log(MAX_PROBABILITY))


def _cut(hint: DraftTree, max_nodes: int, max_depth: int, max_children: int) -> DraftTree:
    """The hint within the budget; of too many siblings the likeliest are kept."""
    if max_children:
        hint = likeliest_children(hint, max_children)
    if len(hint) > max_nodes or any(depth >= max_depth for depth in hint.depths):
        hint = hint.select([node for node, depth in enumerate(hint.depths) if depth < max_depth])
        hint = hint.select(most_probable(hint, max_nodes))
    return hint


def _path_tokens(token_ids: list[int], parents: list[int], node: int) -> list[int]:
    tokens = []
    while node != ROOT:
        tokens.append(token_ids[node])
        node = parents[node]
    return tokens[::-1]
