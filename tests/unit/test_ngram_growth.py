"""Growth against brute force over all paths, the budget, the hint, and the shared noise."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.calibration import Calibration
from services.engine import ProposeTask
from services.ngram.counts import count_ngrams
from services.ngram.growth import MAX_PROBABILITY, estimate, grow, learn
from services.ngram.katz import fit
from services.ngram.mixture import Candidates, Mixture
from services.ngram.session import NgramSession
from services.ngram.table import NgramTable, store
from stagespec.noise import gumbel
from stagespec.tree import EMPTY_DRAFT, ROOT, DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.sampling_pb2 import SamplingParams

VOCABULARY_SIZE = 5
ALL = np.arange(VOCABULARY_SIZE)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Mixture:
    """A table that has seen all of a small vocabulary, mixed with sessions."""
    path = tmp_path_factory.mktemp("ngram") / "table"
    text = np.concatenate([ALL, np.minimum(np.random.default_rng(7).geometric(0.4, size=80), 5) - 1])
    counted = count_ngrams(text, 3)
    store(path, fit(counted, [np.ones(len(k), bool) for k in counted.keys], VOCABULARY_SIZE), "hash")
    return Mixture(NgramTable(path), context_order=4, context_weight=0.6)


def session_of(context: list[int]) -> NgramSession:
    session = NgramSession()
    session.apply(0, context)
    return session


def propose(mixture, context, *, hint=EMPTY_DRAFT, sampling=GREEDY, drafter_index=3, **budget) -> DraftTree:
    task = ProposeTask(sampling, hint, Budget(**budget), drafter_index)
    return grow(mixture, session_of(context), task)


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Log probability of each node's path, by its tokens."""
    nodes = [tree.path(node) for node in range(len(tree))]
    return {
        tuple(tree.token_ids[n] for n in path): total
        for path, total in zip(nodes, tree.path_log_probs, strict=True)
    }


def all_paths(mixture, context, max_depth, given_log_probs) -> dict[tuple[int, ...], float]:
    """Log probability of every path there is."""
    session, totals = session_of(context), {(): 0.0}
    for depth in range(max_depth):
        for path in itertools.product(range(VOCABULARY_SIZE), repeat=depth):
            suffix = (context + list(path))[-mixture.reach :]
            for token, p in enumerate(mixture.probabilities(session, suffix, ALL).tolist()):
                log_prob = given_log_probs.get((*path, token), math.log(min(p, MAX_PROBABILITY)))
                totals[*path, token] = totals[path] + log_prob
    del totals[()]
    return totals


HINTS = {
    "none": EMPTY_DRAFT,
    "likely": DraftTree((0, 0, 1), (ROOT, 0, 0), (-0.1, -0.2, -1.5), (0, 1, 0)),
    "unlikely": DraftTree((4, 4, 2), (ROOT, 0, ROOT), (-7.0, -9.0, -5.0), (1, 1, 0)),
}


@settings(deadline=None, max_examples=40)
@given(
    context=st.lists(st.integers(0, 4), max_size=12),
    max_nodes=st.integers(3, 40),
    max_depth=st.integers(2, 3),
    name=st.sampled_from(sorted(HINTS)),
)
def test_the_tree_has_the_most_probable_paths_of_all(mixture, context, max_nodes, max_depth, name):
    hint = HINTS[name]
    tree = propose(mixture, context, hint=hint, max_nodes=max_nodes, max_depth=max_depth)

    own = paths_of(hint)
    log_probs = dict(zip(own, hint.log_probs, strict=True))
    everything = all_paths(mixture, context, max_depth, log_probs)
    new = sorted((total for path, total in everything.items() if path not in own), reverse=True)
    expected = sorted([*own.values(), *new[: max_nodes - len(own)]])
    found = paths_of(tree)
    # Which of several equally probable paths is taken does not matter.
    np.testing.assert_allclose(sorted(found.values()), expected, atol=1e-9)
    for path, total in found.items():
        assert total == pytest.approx(everything[path], abs=1e-9)


def test_hint_nodes_stay_as_they_are_and_are_extended(mixture):
    hint = HINTS["likely"]
    tree = propose(mixture, [0, 1, 0], hint=hint, max_nodes=12, max_depth=5)
    assert tree.select(range(3)) == hint
    assert len(tree) == 12
    assert set(tree.drafter_indices[3:]) == {3}
    assert any(parent in (1, 2) for parent in tree.parents[3:]), "no leaf of the hint was extended"
    assert len(paths_of(tree)) == 12, "a node was proposed twice"


def test_the_budget_holds_with_or_without_room(mixture):
    hint = HINTS["likely"]
    assert len(propose(mixture, [0, 1], hint=hint, max_nodes=0, max_depth=4)) == 0
    assert len(propose(mixture, [0, 1], hint=hint, max_nodes=9, max_depth=0)) == 0
    assert propose(mixture, [0, 1], hint=hint, max_nodes=2, max_depth=4) == hint.select([0, 1])
    assert max(propose(mixture, [0, 1], hint=hint, max_nodes=40, max_depth=2).depths) == 1
    assert propose(mixture, [0, 1], hint=hint, max_nodes=3, max_depth=4) == hint


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=11)])
def test_no_node_is_below_its_price(mixture, sampling):
    budget = {"max_nodes": 60, "max_depth": 4, "sampling": sampling}
    free = propose(mixture, [0, 1, 0, 2], **budget)
    priced = propose(mixture, [0, 1, 0, 2], node_price=0.05, **budget)
    worth = {path for path, total in paths_of(free).items() if total >= math.log(0.05)}
    assert set(paths_of(priced)) == worth
    assert 0 < len(worth) < len(free) == 60


def test_repeated_text_is_proposed_as_one_long_path():
    mixture = Mixture(None, context_order=8, context_weight=0.8)
    line = [40, 41, 42, 43, 44, 45, 46, 47]
    tree = propose(mixture, [*line, 9, *line[:4]], max_nodes=4, max_depth=8)
    assert tree.token_ids == (44, 45, 46, 47)
    assert tree.parents == (-1, 0, 1, 2)
    assert len(propose(mixture, [1, 2, 3], max_nodes=8, max_depth=8)) == 0  # nothing repeats: no guess
    assert len(propose(mixture, [], max_nodes=8, max_depth=8)) == 0


def test_at_temperature_the_best_child_is_the_model_s_own_draw(mixture):
    context, temperature = [0, 1, 0, 2, 1], 0.9
    session = session_of(context)
    for seed in range(60):
        sampling = SamplingParams(temperature=temperature, seed=seed * 7919)
        tree = propose(mixture, context, sampling=sampling, max_nodes=30, max_depth=3)
        children = tree.children()
        for parent in (ROOT, *children[ROOT].values()):
            if parent not in children:
                continue
            path = [] if parent == ROOT else [tree.token_ids[node] for node in tree.path(parent)]
            suffix = (context + path)[-mixture.reach :]
            p = mixture.probabilities(session, suffix, ALL)
            noise = gumbel(sampling.seed, len(context) + len(path), ALL)
            draw = int(np.argmax(np.log(p) / temperature + noise))
            best = max(children[parent].values(), key=lambda node: tree.log_probs[node])
            assert tree.token_ids[best] == draw
    assert propose(mixture, context, sampling=sampling, max_nodes=30, max_depth=3) == tree


@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=16),
    rest=st.floats(0.0, 1.0),
    temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0, 100.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_estimates_are_log_probabilities(weights, rest, temperature, seed):
    p = np.array(weights) / (sum(weights) + rest)
    candidates = Candidates(np.arange(len(p)), p)
    found = estimate(candidates, SamplingParams(temperature=temperature, seed=seed), 5)
    assert np.isfinite(found).all()
    assert (found < 0.0).all()
    assert np.exp(found).sum() <= 1.0 + 1e-9
    if temperature <= 1e-6:
        np.testing.assert_allclose(np.exp(found), np.minimum(p, MAX_PROBABILITY), atol=1e-4)


def test_estimates_are_calibrated_when_the_model_errs_as_documented():
    # Four candidates, and a hundred other tokens that share the rest of the mass.
    p = np.array([0.3, 0.2, 0.1, 0.1, *[0.003] * 100])
    candidates, tokens = Candidates(np.arange(4), p[:4]), np.arange(104)
    errors = np.random.default_rng(1).gumbel(size=(3000, 104))
    expected = hits = 0.0
    for position, error in enumerate(errors):
        target = int(np.argmax(np.log(p) + error + gumbel(3, position, tokens)))
        found = np.exp(estimate(candidates, SamplingParams(temperature=1.0, seed=3), position))
        expected += float(found.sum())
        hits += target < 4
    assert abs(expected - hits) / len(errors) < 0.08  # the rest counts with a typical noise, not its own


@settings(deadline=None, max_examples=40)
@given(
    context=st.lists(st.integers(0, 4), max_size=12),
    max_children=st.integers(0, 4),
    name=st.sampled_from(sorted(HINTS)),
)
def test_no_node_has_more_than_max_children_and_the_likeliest_stay(mixture, context, max_children, name):
    hint = HINTS[name]
    tree = propose(mixture, context, hint=hint, max_nodes=400, max_depth=3, max_children=max_children)
    everything = propose(mixture, context, hint=hint, max_nodes=400, max_depth=3)
    if not max_children:
        assert tree == everything
        return
    paths = paths_of(tree)
    of_hint, of_all = hint.children(), paths_of(everything)
    sizes = [len(children) for children in tree.children().values()]
    assert max(sizes) == max_children
    for path in [(), *(path for path in paths if len(path) < 3)]:
        kept = [total for other, total in paths.items() if other[:-1] == path]
        rivals = [total for other, total in of_all.items() if other[:-1] == path]
        if path == () and not of_hint:
            assert sorted(kept) == pytest.approx(sorted(rivals)[-max_children:], abs=1e-9)
        assert len(kept) == max_children


def test_of_too_many_siblings_in_the_hint_the_likeliest_stay(mixture):
    hint = DraftTree((1, 2, 3, 4), (ROOT, ROOT, 0, 1), (-2.0, -1.0, -0.1, -0.1), (0,) * 4)
    tree = propose(mixture, [0, 1], hint=hint, max_nodes=2, max_depth=4, max_children=1)
    assert (tree.token_ids, tree.parents) == ((2, 4), (ROOT, 0))


class Taught(Calibration):
    """Writes down what it is taught, and halves every estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[tuple[float, int, bool]] = []

    def log_prob(self, log_prob: float, rank: int) -> float:
        return log_prob - math.log(2)

    def learn(self, log_prob: float, rank: int, came_true: bool) -> None:
        self.lessons.append((log_prob, rank, came_true))


def test_estimates_are_calibrated_before_they_are_priced(mixture):
    task = ProposeTask(GREEDY, EMPTY_DRAFT, Budget(max_nodes=40, max_depth=1))
    plain = grow(mixture, session_of([0, 1, 0]), task)
    halved = grow(mixture, session_of([0, 1, 0]), task, Taught())
    assert halved.log_probs == pytest.approx([p - math.log(2) for p in plain.log_probs])
    dear = ProposeTask(
        GREEDY, EMPTY_DRAFT, Budget(max_nodes=40, max_depth=1, node_price=0.75 * math.exp(plain.log_probs[0]))
    )
    assert len(grow(mixture, session_of([0, 1, 0]), dear)) >= 1
    assert len(grow(mixture, session_of([0, 1, 0]), dear, Taught())) == 0


def test_outcomes_are_learnt_along_the_path_that_was_drawn_and_once():
    mixture = Mixture(None, context_order=8, context_weight=0.8)
    line = [40, 41, 42, 43, 44]
    session = session_of([*line, 9, *line[:2]])
    task = ProposeTask(GREEDY, EMPTY_DRAFT, Budget(max_nodes=3, max_depth=8))
    calibration = Taught()
    tree = grow(mixture, session, task, calibration)
    assert tree.token_ids == (42, 43, 44)
    likeliest = [log_prob + math.log(2) for log_prob in tree.log_probs]

    session.apply(len(session), [])
    session.apply(len(session), [42, 7, 44])  # 43 was wrong, and of what would follow it nothing is known
    learn(calibration, session)
    taught = [(p, came_true) for p, rank, came_true in calibration.lessons if rank == 0]
    assert taught == [(pytest.approx(likeliest[0]), True), (pytest.approx(likeliest[1]), False)]
    assert not any(came_true for _, rank, came_true in calibration.lessons if rank)
    calibration.lessons.clear()
    learn(calibration, session)
    grow(mixture, session, task, calibration)
    session.apply(len(session) - 1, [44])  # the context was cut below the draft's root
    learn(calibration, session)
    assert not calibration.lessons
