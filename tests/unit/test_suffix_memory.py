"""The memory against a plain scan of what it should hold; and what must never come out of it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine import ProposeTask
from services.ngram import memory as memory_module
from services.ngram.engine import NgramEngine, NgramJob
from services.ngram.memory import MIN_MATCH, SuffixMemory
from services.ngram.mixture import Mixture
from services.ngram.session import NgramSession
from services.ngram.settings import NgramSettings
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.sampling_pb2 import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
tokens_of = st.lists(st.integers(0, 2), max_size=14)
documents_of = st.lists(st.tuples(st.sampled_from("abc"), tokens_of), max_size=8)


def held(
    documents: list[tuple[str, list[int]]], max_tokens: int, longest: int
) -> list[tuple[str, list[int]]]:
    """The documents that should be there, by going back from the latest until there is no room."""
    kept, room = [], max_tokens
    for owner, token_ids in reversed(documents):
        text = token_ids[-min(longest, max_tokens - 1) :]
        if len(text) <= MIN_MATCH:
            continue
        room -= len(text) + 1
        if room < 0:
            break
        kept.append((owner, text))
    return kept[::-1]


def scan(texts: list[list[int]], suffix: list[int]) -> list[list[int]]:
    """What followed each end of `suffix` in the texts, by looking everywhere."""
    found = []
    for m in range(MIN_MATCH, len(suffix) + 1):
        followed = [t[i] for t in texts for i in range(m, len(t)) if t[i - m : i] == suffix[-m:]]
        if not followed:
            break
        found.append(followed)
    return found


@settings(deadline=None)
@given(documents=documents_of, suffix=tokens_of, max_tokens=st.integers(5, 60), longest=st.integers(4, 12))
def test_it_finds_what_a_scan_finds_and_only_the_owner_s(documents, suffix, max_tokens, longest):
    memory = SuffixMemory(max_tokens, longest)
    for number, (owner, token_ids) in enumerate(documents, start=1):
        memory.add(owner, token_ids)
        expected = held(documents[:number], max_tokens, longest)
        assert memory.num_documents == len(expected)
        assert memory.num_tokens == sum(len(text) for _, text in expected) <= max_tokens
        for each, ending in itertools.product("abcd", (suffix, token_ids[-5:], token_ids[:4])):
            found = [tokens.tolist() for tokens in memory.continuations(each, ending)]
            assert found == scan([text for owner, text in expected if owner == each], ending)


def test_only_the_latest_places_are_looked_at(monkeypatch):
    monkeypatch.setattr(memory_module, "MAX_PLACES", 3)
    memory = SuffixMemory(100, 50)
    for follower in range(10, 16):
        memory.add("", [1, 2, 3, follower])
    assert [tokens.tolist() for tokens in memory.continuations("", [1, 2, 3])] == [[13, 14, 15]]


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(tokens_of, max_size=4), context=tokens_of, drafted=tokens_of, order=st.integers(2, 9)
)
def test_the_mixture_counts_both_texts_and_still_sums_to_one(documents, context, drafted, order):
    memory = SuffixMemory(1000, 100)
    for token_ids in documents:
        memory.add("", token_ids)
    session = NgramSession(memory)
    session.apply(0, context)
    mixture = Mixture(None, context_order=order, context_weight=0.9, vocabulary_size=4)
    suffix = (context + drafted)[-mixture.reach :]
    whole = mixture.probabilities(session, suffix, np.arange(4))
    assert whole.sum() == pytest.approx(1.0)
    assert whole.min() > 0.0
    candidates = mixture.candidates(session, suffix, 4)
    np.testing.assert_allclose(candidates.probabilities, whole[candidates.token_ids], atol=1e-12)
    assert {t for level in scan(documents, suffix[-(order - 1) :]) for t in level} <= set(
        candidates.token_ids.tolist()
    )


def draft(engine: NgramEngine, tenant: str, context: list[int], *, close: bool = True) -> DraftTree:
    session = engine.new_session(tenant)
    session.apply(0, context)
    job = NgramJob(session, ProposeTask(GREEDY, EMPTY_DRAFT, Budget(max_nodes=16, max_depth=4)))
    engine.run([job])
    if close:
        session.close()
    assert job.error is None
    return job.answer.draft


OPENING, SECRETS = [1, 2, 3, 4], {"ann": [51, 52, 53], "bob": [61, 62, 63], "": [71, 72, 73]}


@pytest.mark.parametrize("scope", ["request", "tenant", "shared"])
def test_each_scope_shows_just_what_it_says(scope):
    engine = NgramEngine(NgramSettings(memory_scope=scope))
    for tenant, secret in SECRETS.items():
        draft(engine, tenant, [*OPENING, *secret])
    for tenant in (*SECRETS, "eve"):
        found = set(draft(engine, tenant, OPENING).token_ids)
        own = set(SECRETS.get(tenant, [])) if tenant else set()
        allowed = {"request": set(), "tenant": own, "shared": set().union(*SECRETS.values())}[scope]
        assert found == allowed
    if scope == "request":
        assert engine.counters == {}
    else:
        counters = engine.counters
        # OPENING itself is kept too: four tokens for each of the tenants that may have a text.
        expected = {"tenant": (5, 2 * 7 + 3 * 4), "shared": (7, 3 * 7 + 4 * 4)}[scope]
        assert (counters["memory_documents_live"], counters["memory_tokens_live"]) == expected
        assert counters["memory_hits_total"] > 0


def test_a_live_session_is_in_nobody_s_memory():
    engine = NgramEngine(NgramSettings(memory_scope="shared"))
    draft(engine, "ann", [*OPENING, 51], close=False)
    assert len(draft(engine, "ann", OPENING)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_scope": "all"}, "memory_scope is 'all' and must be one of request, tenant, shared"),
        ({"memory_scope": "tenant", "context_order": 3}, "context_order is 3 and must be at least 4 with"),
        (
            {"memory_tokens": 100},
            "max_document_tokens is 8192 and must be .* below memory_tokens, which is 100",
        ),
        ({"max_document_tokens": 3}, "max_document_tokens is 3 and must be at least 4"),
        ({"memory_tokens": 1 << 40}, "memory_tokens is 1099511627776 and must be at most"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        NgramSettings(**options)
