"""Engines with a prefix pool against engines without one: fewer rows, and not one other token."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.draft.engine import DraftEngine
from services.draft.settings import DraftSettings
from services.engine import Job, Proposal, ProposeTask, Verdict, VerifyTask
from services.target.engine import TargetEngine
from services.target.settings import TargetSettings
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.models import VOCABULARY_SIZE, save, tiny_model

POOL = 64 * 1024 * 1024
SAMPLING = SamplingParams(temperature=0.8, seed=5, prompt_length=1)
GREEDY = SamplingParams(prompt_length=1)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> tuple[TargetEngine, TargetEngine]:
    """With a pool, and without."""
    plain = TargetSettings(save(tiny_model("llama"), tmp_path_factory.mktemp("target")), prefill_chunk=8)
    return TargetEngine(replace(plain, prefix_pool_bytes=POOL)), TargetEngine(plain)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> tuple[DraftEngine, DraftEngine]:
    plain = DraftSettings(save(tiny_model("llama"), tmp_path_factory.mktemp("draft")), prefill_chunk=8)
    return DraftEngine(replace(plain, prefix_pool_bytes=POOL)), DraftEngine(plain)


def ask(engine: Any, session: Any, base: int, token_ids: Sequence[int], task: Any) -> Any:
    session.apply(base, token_ids)
    job: Job[Any, Any, Any] = Job(session, task, base, token_ids)
    while not job.done:
        engine.run([job])
    assert job.answer is not None, job.error
    return job.answer


def verify(engine: Any, session: Any, base: int, token_ids: Sequence[int], draft: DraftTree) -> Verdict:
    verdict: Verdict = ask(engine, session, base, token_ids, VerifyTask(SAMPLING, draft))
    return verdict


def propose(engine: Any, session: Any, base: int, token_ids: Sequence[int]) -> Proposal:
    budget = Budget(max_nodes=8, max_depth=3, node_price=0.001)
    proposal: Proposal = ask(engine, session, base, token_ids, ProposeTask(SAMPLING, EMPTY_DRAFT, budget))
    return proposal


def chain(token_ids: Sequence[int]) -> DraftTree:
    size = len(token_ids)
    return DraftTree(tuple(token_ids), tuple(range(-1, size - 1)), (0.0,) * size, (0,) * size)


TOKEN = st.integers(0, VOCABULARY_SIZE - 1)
# One conversation after the other or at once: whose it is, which earlier context it goes on from, how much of
# that it keeps, what it adds, tokens to generate, and whether it ends before the next begins.
CHATS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 5),
        st.integers(0, 60) | st.just(200),
        st.lists(TOKEN, min_size=1, max_size=12),
        st.integers(1, 6),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=25)
@given(CHATS)
def test_a_pool_saves_rows_and_changes_no_token(targets, drafts, chats):
    known: list[list[int]] = []
    still_open: list[Any] = []
    for tenant, which, kept, fresh, num_steps, ends in chats:
        earlier = known[which % len(known)] if known else []
        context = earlier[:kept] + fresh
        sessions = [engine.new_session(tenant) for engine in (*targets, *drafts)]
        base = 0
        for step in range(num_steps):
            with_pool, without, guess, plain_guess = sessions
            found, expected = (
                propose(drafts[0], guess, base, context[base:]),
                propose(drafts[1], plain_guess, base, context[base:]),
            )
            assert found.draft.token_ids == expected.draft.token_ids
            assert found.draft.parents == expected.draft.parents
            assert found.num_rows <= expected.num_rows
            verdict = verify(targets[0], with_pool, base, context[base:], found.draft)
            plain = verify(targets[1], without, base, context[base:], found.draft)
            assert (verdict.token_ids, verdict.accepted_nodes) == (plain.token_ids, plain.accepted_nodes)
            assert verdict.num_rows <= plain.num_rows
            if step:
                assert verdict.num_rows == plain.num_rows, "only the first request of a session is shorter"
            base = len(context)
            context = [*context, *verdict.token_ids]
        known.append(context)
        still_open += sessions
        if ends:
            while still_open:
                still_open.pop().close()
    while still_open:
        still_open.pop().close()


def test_the_next_turn_of_a_chat_computes_only_what_is_new(targets, drafts):
    prompt, reply = [*range(40)], [50, 51, 52]
    for engine, tenants in ((targets[0], ("chat", "other")), (drafts[0], ("chat", "other"))):
        session = engine.new_session("chat")
        if engine is targets[0]:
            first = verify(engine, session, 0, prompt, EMPTY_DRAFT)
            second = verify(engine, session, 40, first.token_ids, EMPTY_DRAFT)
            assert (first.num_rows, second.num_rows) == (40, 1)
            turn = [*prompt, *first.token_ids, *second.token_ids, *reply]
        else:
            assert propose(engine, session, 0, prompt).num_rows == 40
            turn = [*prompt, *reply]
        session.close()
        num_new = len(turn) - len(prompt) - (1 if engine is targets[0] else 0)
        for tenant, num_rows in zip(tenants, (num_new, len(turn)), strict=True):
            session = engine.new_session(tenant)
            ran = (
                verify(engine, session, 0, turn, EMPTY_DRAFT)
                if engine is targets[0]
                else propose(engine, session, 0, turn)
            )
            assert ran.num_rows == num_rows, tenant
            session.close()
        counters = engine.counters
        assert counters["cache_bytes_live"] == 0
        assert counters["prefix_pool_hits_total"] >= 1
        assert counters["prefix_pool_rows_total"] >= 40


def test_accepted_drafts_of_the_last_step_are_kept_too(targets):
    prompt = [9, 8, 7, 6, 5, 4]
    session = targets[1].new_session()
    expected: list[int] = []
    while len(expected) < 4:
        base = 0 if not expected else 5 + len(expected)
        expected += verify(targets[1], session, base, [*prompt, *expected][base:], EMPTY_DRAFT).token_ids
    session.close()
    session = targets[0].new_session("last step")
    verdict = verify(targets[0], session, 0, prompt, chain(expected[:3]))
    assert list(verdict.token_ids) == expected
    session.close()
    session = targets[0].new_session("last step")
    # The bonus token alone has no row yet.
    assert verify(targets[0], session, 0, [*prompt, *expected], EMPTY_DRAFT).num_rows == 1
    session.close()


def test_a_sessions_faults_do_not_stay(targets, monkeypatch):
    engine, prompt = targets[0], [3] * 20
    task = VerifyTask(GREEDY, EMPTY_DRAFT)
    session = engine.new_session("fault")
    session.apply(0, prompt)
    job: Job[Any, Any, Any] = Job(session, task)
    calls = itertools.count()

    def fails_at_last(*_: Any) -> Verdict:
        next(calls)
        raise RuntimeError("a fault")

    monkeypatch.setattr(engine, "_decide", fails_at_last)
    while not job.done:
        engine.run([job])
    assert (next(calls), job.answer) == (1, None)
    session.close()
    monkeypatch.undo()
    session = engine.new_session("fault")
    assert ask(engine, session, 0, prompt, task).num_rows == len(prompt)
    session.close()
