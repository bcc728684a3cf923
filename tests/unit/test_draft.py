"""Growth against enumeration, and a draft session's caches against a session that starts afresh."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.draft.candidates import Candidates, update_trust
from services.draft.engine import DraftEngine, DraftSession
from services.draft.growth import grow
from services.draft.settings import DraftSettings
from services.engine import Job, Proposal, ProposeTask
from stagespec.tree import EMPTY_DRAFT, ROOT, DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.models import VOCABULARY_SIZE, save, tiny_model

PROBABILITIES = st.lists(st.integers(1, 9), min_size=0, max_size=3, unique=True)
KNOWN = st.dictionaries(st.lists(st.integers(0, 2), max_size=3).map(tuple), PROBABILITIES, max_size=12)


def candidates(weights: list[int]) -> Candidates:
    ranked = sorted(enumerate(weights), key=lambda pair: (-pair[1], pair[0]))
    own = {token_id: math.log(weight / 30) for token_id, weight in ranked}
    return Candidates(tuple(own), tuple(own.values()), own, {})


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))]


@given(KNOWN, st.integers(1, 10), st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.1]))
def test_growth_takes_the_most_probable_paths(known, max_nodes, max_depth, node_price):
    known = {path: candidates(weights) for path, weights in known.items()}
    budget = Budget(max_nodes=max_nodes, max_depth=max_depth, node_price=node_price)
    found = grow(known.get, EMPTY_DRAFT, budget, 2)

    possible: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    leaves = 0
    while frontier:
        path, log_prob = frontier.pop()
        if len(path) == max_depth:
            continue
        if path not in known:
            leaves += 1
            continue
        for token_id, child in zip(known[path].token_ids, known[path].log_probs, strict=True):
            total = log_prob + child
            if node_price == 0 or total >= math.log(node_price):
                possible[*path, token_id] = total
                frontier.append(((*path, token_id), total))
    best = sorted(possible.values(), reverse=True)[:max_nodes]
    chosen = paths_of(found.draft)
    assert len(chosen) == len(set(chosen)) == len(best)
    assert sorted((possible[path] for path in chosen), reverse=True) == pytest.approx(best)
    assert found.draft.path_log_probs == pytest.approx([possible[path] for path in chosen])
    assert set(found.draft.drafter_indices) <= {2}
    if not leaves:
        assert found.next_round_gain == 0.0


def test_hinted_nodes_keep_their_owner():
    known = {(): candidates([9, 8]), (0,): candidates([9])}
    hint = DraftTree((0, 7), (ROOT, 0), (-1.0, -1.0), (5, 5))
    draft = grow(known.get, hint, Budget(max_nodes=8, max_depth=4), 1).draft
    owners = dict(zip(paths_of(draft), draft.drafter_indices, strict=True))
    assert owners == {(0,): 5, (1,): 1, (0, 0): 1}


def test_trust_moves_towards_whoever_foresaw_the_token():
    place = Candidates((1, 2), (-0.1, -3.0), own={1: -0.1}, guesses={2: -0.1})
    assert update_trust(0.5, place, 2) > 0.5 > update_trust(0.5, place, 1)
    assert update_trust(0.5, place, 9) == pytest.approx(0.5)
    assert update_trust(0.5, Candidates((1,), (-0.1,), {1: -0.1}, {}), 1) == 0.5


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> DraftEngine:
    return DraftEngine(
        DraftSettings(save(tiny_model("llama"), tmp_path_factory.mktemp("draft")), prefill_chunk=4)
    )


def propose(engine: DraftEngine, session: DraftSession, base: int, token_ids, task: ProposeTask) -> Proposal:
    session.apply(base, token_ids)
    job = Job[DraftSession, ProposeTask, Proposal](session, task, base, token_ids)
    while not job.done:
        engine.run([job])
    assert job.answer is not None
    return job.answer


TOKEN = st.integers(0, VOCABULARY_SIZE - 1)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 20),  # base length, modulo what there is
        st.lists(TOKEN, min_size=1, max_size=6),
        st.integers(0, 4),  # how many of the last draft's tokens to commit first
        st.lists(st.tuples(st.integers(-1, 3), TOKEN), max_size=4),  # an earlier drafter's hint
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(STEPS, st.sampled_from([0.0, 0.8]))
def test_any_sequence_of_proposals_equals_a_fresh_session(engine, steps, temperature):
    session = engine.new_session()
    context: list[int] = []
    draft = EMPTY_DRAFT
    sampling = SamplingParams(temperature=temperature, seed=5, repetition_penalty=1.1)
    for base, fresh, num_followed, hinted in steps:
        followed = [] if not len(draft) else [draft.token_ids[n] for n in draft.path(len(draft) - 1)]
        base = len(context) if num_followed else base % (len(context) + 1)
        added = followed[:num_followed] + fresh
        context[base:] = added
        nodes = {(min(parent, i - 1), token_id): None for i, (parent, token_id) in enumerate(hinted)}
        hint = DraftTree(
            tuple(token_id for _, token_id in nodes),
            tuple(min(parent, i - 1) for i, (parent, _) in enumerate(nodes)),
            tuple(-1.0 for _ in nodes),
            tuple(0 for _ in nodes),
        )
        if len(hint.children()) and sum(map(len, hint.children().values())) < len(hint):
            hint = EMPTY_DRAFT  # two siblings with one token: not a legal tree
        task = ProposeTask(sampling, hint, Budget(max_nodes=12, max_depth=4, node_price=0.001), 1)
        session.apply(base, added)
        remembers = bool(session.known)  # the context did not move off what is known: it may answer with more
        used = propose(engine, session, len(context), [], task)
        clean = engine.new_session()
        clean.trust = session.trust
        expected = propose(engine, clean, 0, context, task)
        clean.close()
        assert used.num_rows <= expected.num_rows
        if not remembers:
            assert paths_of(used.draft) == paths_of(expected.draft)
            assert used.draft.log_probs == pytest.approx(expected.draft.log_probs, abs=1e-3)
        draft = used.draft
        seen = [session.row_of(path) is not None for path in paths_of(draft)]
        again = propose(engine, session, len(context), [], ProposeTask(sampling, draft, task.budget, 1))
        assert again.num_rows == seen.count(False), "a pass runs exactly the nodes it has not seen"
        draft = again.draft
    session.close()


def test_an_empty_context_gets_an_empty_draft(engine):
    session = engine.new_session()
    task = ProposeTask(SamplingParams(), EMPTY_DRAFT, Budget(max_nodes=4, max_depth=2))
    assert len(propose(engine, session, 0, [], task).draft) == 0
    before = propose(engine, session, 0, [1, 2, 3], task).draft
    assert len(before) > 0
    assert len(propose(engine, session, 0, [], task).draft) == 0
    assert propose(engine, session, 0, [1, 2, 3], task).draft == before


def test_one_jobs_fault_stays_with_it(engine):
    budget = Budget(max_nodes=4, max_depth=2)
    jobs = []
    for sampling in (SamplingParams(temperature=1.0, top_k=-3), SamplingParams()):
        session = engine.new_session()
        session.apply(0, [1, 2])
        jobs.append(Job(session, ProposeTask(sampling, EMPTY_DRAFT, budget), 0, [1, 2]))
    engine.run(jobs)
    assert [job.error is None for job in jobs] == [False, True]
    assert jobs[1].answer is not None


def test_a_steps_rows_are_the_uncached_context_and_the_unseen_nodes(engine):
    session = engine.new_session()
    budget = Budget(max_nodes=6, max_depth=3)
    first = propose(
        engine, session, 0, [1, 2, 3, 4, 5, 6], ProposeTask(SamplingParams(), EMPTY_DRAFT, budget)
    )
    assert (first.num_rows, first.num_passes) == (6, 2)  # the prefill goes by fours
    second = propose(engine, session, 6, [], ProposeTask(SamplingParams(), first.draft, budget))
    assert (second.num_rows, second.num_passes) == (len(first.draft), 1)
    accepted = [second.draft.token_ids[n] for n in second.draft.path(len(second.draft) - 1)]
    depth_seen = 1
    third = propose(engine, session, 6, [*accepted, 9], ProposeTask(SamplingParams(), EMPTY_DRAFT, budget))
    assert third.num_rows == len(accepted) - depth_seen + 1
