"""Trained drafts: what is served against the plain decoder without tree or cache, and what is refused."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.causal_lm.check import UnservableModelError
from services.draft.artifact import (
    CAUSAL_LM,
    FEATURE,
    MANIFEST,
    WEIGHTS,
    ArtifactError,
    DraftArtifact,
    DraftShape,
    borrowed_digest,
    read_artifact,
    write_artifact,
)
from services.draft.decoder import DraftDecoder
from services.draft.engine import DraftEngine, DraftSession
from services.draft.settings import DraftSettings
from services.engine import Job, Proposal, ProposeTask
from services.target.observe import observe_hidden_states
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.observation_pb2 import ELEMENT_TYPE_FLOAT16, Observation
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.models import CONTEXT_LENGTH, VOCABULARY_SIZE, save, tiny_model

WIDTH = 64
KEPT = torch.arange(0, VOCABULARY_SIZE, 2)
"""Tokens that the heads know: the even ones."""


def random_artifact(kind: str, digest: str = "") -> DraftArtifact:
    shape = DraftShape(
        kind=kind,
        num_layers=2,
        hidden_size=WIDTH if kind == FEATURE else 32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if kind == FEATURE else 8,
        inner_size=96,
        rope_theta=10_000.0,
        epsilon=1e-5,
        max_length=CONTEXT_LENGTH,
        vocabulary_size=VOCABULARY_SIZE,
        tokenizer_hash="",
        target_hidden_size=WIDTH if kind == FEATURE else 0,
        borrowed_digest=digest,
    )
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(size, generator=generator) * (0.2 if len(size) > 1 else 1.0)
        for name, size in shape.tensor_shapes(len(KEPT))
    }
    return DraftArtifact(shape, KEPT, tensors)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory) -> dict[str, Path]:
    model = tiny_model("llama")
    tables = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    made = {}
    for kind in (FEATURE, CAUSAL_LM):
        made[kind] = tmp_path_factory.mktemp("drafts") / kind
        digest = borrowed_digest(*tables) if kind == FEATURE else ""
        write_artifact(made[kind], random_artifact(kind, digest), "float16", {"command": "none"})
    return made


@pytest.fixture(scope="module", params=[(k, n) for k in (FEATURE, CAUSAL_LM) for n in ("native", "torch")])
def engine(request, folders, target) -> DraftEngine:
    kind, kernel = request.param
    return DraftEngine(
        DraftSettings(
            str(folders[kind]),
            kernel=kernel,
            target=target if kind == FEATURE else None,
            prefill_chunk=5,
            num_candidates=VOCABULARY_SIZE,
            prefix_pool_bytes=1 << 20,
        )
    )


def plain_log_probs(
    engine: DraftEngine, path: list[int], features: dict[int, torch.Tensor], num_context: int
) -> dict[int, float]:
    """What the plain decoder expects after a path, without tree or cache."""
    artifact = read_artifact(Path(engine.info.model))
    decoder = DraftDecoder(artifact.shape, len(KEPT))
    decoder.set_tensors(artifact.tensors)
    n = len(path)
    if artifact.shape.kind == FEATURE:
        model = tiny_model("llama")
        embedded = model.get_input_embeddings().weight.detach().half().float()[path]
        given = torch.zeros(n, WIDTH)
        known = torch.zeros(n, dtype=torch.bool)
        for position, values in features.items():
            if position + 1 < num_context:
                given[position + 1], known[position + 1] = values.half().float(), True
        inputs = decoder.inputs(embedded, given, known)
        head = model.get_output_embeddings().weight.detach()[KEPT]
    else:
        places = [token // 2 if token % 2 == 0 else len(KEPT) for token in path]
        inputs, head = decoder.embedded(torch.tensor(places)), artifact.tensors["embedding"][:-1]
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    with torch.no_grad():
        hidden = decoder(inputs[None], torch.arange(n)[None], visible[None])[0, -1]
    log_probs = (head @ hidden).log_softmax(0).tolist()
    return dict(zip(KEPT.tolist(), log_probs, strict=True))


def propose(
    engine: DraftEngine, session: DraftSession, base: int, new: list[int], task: ProposeTask
) -> Proposal:
    session.apply(base, new)
    job = Job[DraftSession, ProposeTask, Proposal](session, task, base, new)
    while not job.done:
        engine.run([job])
    assert job.error is None, job.error
    assert job.answer is not None
    return job.answer


TENANTS = itertools.count()
TOKEN = st.integers(0, VOCABULARY_SIZE - 1)
STEPS = st.lists(
    st.tuples(
        st.lists(TOKEN, min_size=1, max_size=7),  # committed
        st.integers(0, 9),  # how much of the context is rolled back before
        st.integers(0, 3),  # how many of the last draft's tokens are committed first
        st.lists(st.integers(0, 40), max_size=40),  # positions whose hidden states arrive
        st.lists(st.tuples(st.integers(-1, 4), TOKEN), max_size=5, unique=True),  # an earlier drafter's hint
    ),
    min_size=1,
    max_size=4,
)


def hidden_state(context: list[int], position: int) -> torch.Tensor:
    """Something that depends on the tokens up to a position, as a hidden state does."""
    generator = torch.Generator().manual_seed(hash(tuple(context[: position + 1])) % 2**31)
    return torch.randn(WIDTH, generator=generator)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_served_drafts_expect_what_the_plain_decoder_expects(engine, steps):
    session = engine.new_session(str(next(TENANTS)))  # no rows of earlier sessions, which knew more
    context: list[int] = []
    known: dict[int, torch.Tensor] = {}
    draft = EMPTY_DRAFT
    sampling = SamplingParams(temperature=0.0)
    for fresh, back, num_followed, arrived, hinted in steps:
        base = max(0, len(context) - back)
        new = list(fresh)
        if not back and len(draft):
            new = [draft.token_ids[n] for n in draft.path(len(draft) - 1)][:num_followed] + new
        context[base:] = new
        known = {position: values for position, values in known.items() if position < base}
        observations = [Observation(first_position=1, num_positions=2, hidden_states=b"too short")]
        for position in {p for p in arrived if p < len(context) - 1}:
            known[position] = hidden_state(context, position)
            observations += observe_hidden_states(known[position][None], position, ELEMENT_TYPE_FLOAT16)
        rows: dict[tuple[int, int], None] = {(min(p, i - 1), t): None for i, (p, t) in enumerate(hinted)}
        hint = DraftTree(
            tuple(t for _, t in rows),
            tuple(min(p, i - 1) for i, (p, _) in enumerate(rows)),
            (-1.0,) * len(rows),
            (0,) * len(rows),
        )
        if sum(map(len, hint.children().values())) < len(hint):
            hint = EMPTY_DRAFT  # two siblings with one token: not a legal tree
        task = ProposeTask(sampling, hint, Budget(max_nodes=9, max_depth=5), 1, observations)
        draft = propose(engine, session, base, new, task).draft
        for path, candidates in known_places(session):
            expected = plain_log_probs(engine, context + list(path), known, len(context))
            for token_id, log_prob in candidates.own.items():
                assert log_prob == pytest.approx(expected[token_id], abs=2e-3), (path, token_id)
        assert () in dict(known_places(session))
    session.close()


def known_places(session: DraftSession):
    for row, candidates in session.known.items():
        path: list[int] = []
        while row >= len(session.context):
            path.append(session.rows.token_ids[row])
            row = session.rows.parents[row]
        if row == len(session.context) - 1:  # what followed an earlier end of the context may still be there
            yield tuple(reversed(path)), candidates


def test_before_the_target_has_read_the_prompt_the_hint_goes_on_as_it_is(folders, target):
    engine = DraftEngine(DraftSettings(str(folders[FEATURE]), target=target))
    session = engine.new_session()
    hint = DraftTree((5, 6), (-1, 0), (-1.0, -1.0), (0, 0))
    task = ProposeTask(SamplingParams(), hint, Budget(max_nodes=8, max_depth=4), 1)
    context = list(range(40))
    first = propose(engine, session, 0, context, task)
    assert (first.draft, first.num_passes) == (hint, 0)
    states = torch.stack([hidden_state(context, position) for position in range(40)])
    seen = observe_hidden_states(states, 0, ELEMENT_TYPE_FLOAT16)
    second = propose(engine, session, 40, [7], replace(task, observations=seen, hint=EMPTY_DRAFT))
    assert (second.num_passes, second.num_rows) == (1, 41)
    third = propose(engine, session, 41, [9], replace(task, hint=EMPTY_DRAFT))
    assert third.num_rows == 1, "what was computed with hidden states is not computed again"


def test_only_rows_that_nothing_could_better_reach_the_prefix_pool(folders, target):
    engine = DraftEngine(DraftSettings(str(folders[FEATURE]), target=target, prefix_pool_bytes=1 << 20))
    context = list(range(30))
    states = torch.stack([hidden_state(context, position) for position in range(12)])
    task = ProposeTask(
        SamplingParams(),
        EMPTY_DRAFT,
        Budget(max_nodes=4, max_depth=2),
        1,
        observe_hidden_states(states, 0, ELEMENT_TYPE_FLOAT16),
    )
    session = engine.new_session("a")
    propose(engine, session, 0, context, task)
    session.close()
    again = engine.new_session("a")
    again.apply(0, context)
    assert again.rows.path_length == 13
    assert again.features.num_final == 13


def test_children_are_limited(engine):
    session = engine.new_session()
    task = ProposeTask(SamplingParams(), EMPTY_DRAFT, Budget(max_nodes=30, max_depth=4, max_children=2), 1)
    draft = EMPTY_DRAFT
    for _ in range(3):
        draft = propose(engine, session, len(session.context), [] if len(draft) else [2, 4], task).draft
        task = replace(task, hint=draft)
    assert len(draft) > 4
    assert max(map(len, draft.children().values())) == 2
    best = max(session.candidates_after(()).own.values())
    assert max(session.candidates_after(()).log_probs) == pytest.approx(best)


def test_guesses_that_the_head_does_not_know_keep_their_drafters_estimate(engine):
    session = engine.new_session()
    hint = DraftTree((5,), (-1,), (math.log(0.9),), (0,))
    task = ProposeTask(SamplingParams(), hint, Budget(max_nodes=8, max_depth=4), 1)
    draft = propose(engine, session, 0, [2, 4], task).draft
    assert 5 in draft.token_ids
    assert draft.drafter_indices[draft.token_ids.index(5)] == 0


def test_what_is_served_is_described(folders, target):
    made = {
        kind: DraftEngine(
            DraftSettings(
                str(folders[kind]), target=target if kind == FEATURE else None, weight_format="int8"
            )
        ).info
        for kind in folders
    }
    layers = 2 * (64 * 128 + 64 * 64 + 3 * 96 * 64)  # qkv, output, gates, values and down
    head = len(KEPT) * 64
    plain = 4 * (64 * 128 + 5 * 64 + 3 * 64)  # join, norms, and what stands for the unknown
    assert made[FEATURE].pass_weight_bytes == round((layers + head) * 1.125) + plain
    assert made[FEATURE].observations.hidden_states == ELEMENT_TYPE_FLOAT16
    assert made[CAUSAL_LM].observations.hidden_states == 0
    assert all(info.vocabulary_size == VOCABULARY_SIZE for info in made.values())


@pytest.mark.parametrize("stored", ["float16", "int8"])
def test_a_draft_is_read_as_it_was_written(tmp_path, stored):
    artifact = random_artifact(FEATURE)
    write_artifact(tmp_path / "draft", artifact, stored, {})
    found = read_artifact(tmp_path / "draft")
    assert found.shape == artifact.shape
    assert found.token_ids.tolist() == KEPT.tolist()
    for name, tensor in artifact.tensors.items():
        worst = (found.tensors[name] - tensor).abs().max() / tensor.abs().max()
        assert worst <= (1 / 200 if stored == "int8" else 1 / 2000), name


def test_damaged_and_foreign_drafts_are_refused_by_name(folders, target, tmp_path):
    def refusal(folder: Path, **options) -> str:
        with pytest.raises(UnservableModelError) as caught:
            DraftEngine(DraftSettings(str(folder), **options))
        return str(caught.value)

    assert "name that in `target`" in refusal(folders[FEATURE])
    other = save(tiny_model("llama", seed=1), tmp_path / "other")
    assert "another target" in refusal(folders[FEATURE], target=other)
    assert "cannot be read" in refusal(folders[FEATURE], target=str(tmp_path / "nowhere"))
    assert "cannot run draft" in refusal(folders[CAUSAL_LM], kernel="generic")
    assert "ends at 256" in refusal(folders[CAUSAL_LM], max_context_length=512)

    weights = folders[CAUSAL_LM] / WEIGHTS
    whole = weights.read_bytes()
    for damaged in (whole[:-5], whole[:-1] + bytes([whole[-1] ^ 1])):
        copy = tmp_path / str(len(damaged))
        copy.mkdir()
        for path in folders[CAUSAL_LM].iterdir():
            (copy / path.name).write_bytes(damaged if path.name == WEIGHTS else path.read_bytes())
        assert "truncated or altered" in refusal(copy)
        (copy / WEIGHTS).unlink()
        assert "missing" in refusal(copy)
        (copy / MANIFEST).write_text(json.dumps({"files": {}}))
        with pytest.raises(ArtifactError, match="does not list"):
            read_artifact(copy)


def test_ids_of_kept_tokens_may_be_any(engine):
    # The noise must be that of the target's ids, not of places in the head.
    session = engine.new_session()
    sampling = SamplingParams(temperature=1.0, seed=3)
    task = ProposeTask(sampling, EMPTY_DRAFT, Budget(max_nodes=6, max_depth=1), 1)
    draft = propose(engine, session, 0, [2, 4], task).draft
    from stagespec.noise import gumbel

    expected = plain_log_probs(engine, [2, 4], {}, 2)
    ids = np.array(sorted(expected))
    scores = np.array([expected[i] for i in ids]) + gumbel(3, 2, ids)
    assert draft.token_ids[0] == ids[np.argmax(scores)]
