"""A session against a fresh one and a plain scan; the mixture against its promise to sum to 1."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ngram import session as session_module
from services.ngram.counts import count_ngrams
from services.ngram.katz import fit
from services.ngram.mixture import Mixture
from services.ngram.session import NgramSession
from services.ngram.table import NgramTable, store

VOCABULARY_SIZE = 5
tokens_of = st.lists(st.integers(0, 3), max_size=10)


def fresh(context: list[int]) -> NgramSession:
    session = NgramSession()
    session.apply(0, context)
    return session


def scan(context: list[int], suffix: list[int]) -> list[list[int]]:
    """What followed each end of `suffix` in the context, by looking everywhere."""
    found = []
    for m in range(1, len(suffix) + 1):
        followed = [context[i] for i in range(m, len(context)) if context[i - m : i] == suffix[-m:]]
        if not followed:
            break
        found.append(followed)
    return found


@given(deltas=st.lists(st.tuples(st.integers(0, 30), tokens_of), max_size=8), suffix=tokens_of)
def test_any_deltas_leave_what_a_fresh_session_has(deltas, suffix):
    session, context = NgramSession(), []
    for base, token_ids in deltas:
        base = min(base, len(context))
        session.apply(base, token_ids)
        context[base:] = token_ids

    other = fresh(context)
    assert vars(session) == vars(other)
    assert session.last(100) == context
    assert session.last(2) == context[-2:]
    for ending in (suffix, context[-6:], context[-3:] + suffix[:1]):
        found = [tokens.tolist() for tokens in session.continuations(ending)]
        assert found == scan(context, ending)
    assert session.occurrences(range(4)).tolist() == [context.count(token) for token in range(4)]


def test_a_closed_session_holds_nothing():
    session = fresh([1, 2, 1, 2])
    session.close()
    assert vars(session) == vars(NgramSession())


def test_only_the_latest_places_of_a_frequent_token_are_looked_at(monkeypatch):
    monkeypatch.setattr(session_module, "MAX_OCCURRENCES", 3)
    session = fresh([7, 1, 7, 2, 7, 3, 7, 4, 7])
    assert [tokens.tolist() for tokens in session.continuations([7])] == [[3, 4]]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> NgramTable:
    path: Path = tmp_path_factory.mktemp("ngram") / "table"
    text = np.random.default_rng(5).integers(0, 4, size=60)
    counted = count_ngrams(text, 3)
    store(path, fit(counted, [np.ones(len(k), bool) for k in counted.keys], VOCABULARY_SIZE), "hash")
    return NgramTable(path)


@settings(deadline=None)
@given(
    context=st.lists(st.integers(0, 4), max_size=25),
    drafted=st.lists(st.integers(0, 4), max_size=3),
    weight=st.floats(0, 1),
    order=st.integers(2, 9),
    with_table=st.booleans(),
)
def test_the_mixture_sums_to_one_and_its_candidates_are_the_best(
    table, context, drafted, weight, order, with_table
):
    mixture = Mixture(
        table if with_table else None,
        context_order=order,
        context_weight=weight,
        vocabulary_size=VOCABULARY_SIZE,
    )
    session = fresh(context)
    suffix = (context + drafted)[-mixture.reach :]
    whole = mixture.probabilities(session, suffix, np.arange(VOCABULARY_SIZE))
    assert abs(whole.sum() - 1.0) < 1e-9
    assert whole.min() > 0.0

    candidates = mixture.candidates(session, suffix, VOCABULARY_SIZE)
    np.testing.assert_allclose(candidates.probabilities, whole[candidates.token_ids], atol=1e-12)
    if with_table:  # which has seen tokens 0 to 3
        best = [
            token for token in np.argsort(-whole, kind="stable").tolist() if token in candidates.token_ids
        ]
        assert candidates.token_ids.tolist() == best
        assert {0, 1, 2, 3} <= set(best)


def test_a_longer_match_is_surer(table):
    # After every prefix of 1 2 3 4 the continuation was seen once, next to rival ones after shorter matches.
    mixture = Mixture(None, context_order=8, context_weight=1.0)
    surest = []
    for matched in ([3], [2, 3], [1, 2, 3], [0, 1, 2, 3]):
        session = fresh([0, 1, 2, 3, 4, 9, *matched])
        candidates = mixture.candidates(session, session.last(mixture.reach), 4)
        assert candidates.token_ids[0] == 4
        surest.append(float(candidates.probabilities[0]))
    assert all(low < high for low, high in itertools.pairwise(surest))
    assert surest[0] > 0.3
    assert surest[-1] > 0.75


def test_matches_are_no_longer_than_the_context_order(table):
    context = [0, 1, 2, 4, 3, 2, 0, 0, 1, 2]  # after 1 2: 4; after 2: 4 and 0
    for order, rivals_differ in ((2, False), (3, True)):
        mixture = Mixture(table, context_order=order, context_weight=1.0)
        assert mixture.reach == 2
        by_match = mixture.probabilities(fresh(context), [1, 2], np.arange(VOCABULARY_SIZE))
        by_token = mixture.probabilities(fresh([5, *context[1:]]), [3, 2], np.arange(VOCABULARY_SIZE))
        assert (by_match[4] - by_token[4] > 0.2) == rivals_differ
