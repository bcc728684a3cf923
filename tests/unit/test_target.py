"""The target's engine: what it computes, what it reports, and one job's fault staying with that job."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.causal_lm.check import UnservableModelError
from services.causal_lm.forward import Output
from services.causal_lm.rows import BLOCK
from services.engine import Job, Verdict, VerifyTask
from services.target.engine import TargetEngine, TargetSession
from services.target.settings import TargetSettings
from stagespec.rpc import RpcError
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.observation_pb2 import ELEMENT_TYPE_FLOAT16, ELEMENT_TYPE_FLOAT32, ObservationRequest
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.models import VOCABULARY_SIZE, save, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def engine(folder) -> TargetEngine:
    return TargetEngine(TargetSettings(folder, prefill_chunk=4, max_batch_rows=8))


def job(
    session: TargetSession, base: int, token_ids, task: VerifyTask
) -> Job[TargetSession, VerifyTask, Verdict]:
    session.apply(base, token_ids)
    return Job(session, task, base, token_ids)


def verify(engine: TargetEngine, session: TargetSession, base: int, token_ids, task: VerifyTask) -> Verdict:
    pending = job(session, base, token_ids, task)
    while not pending.done:
        engine.run([pending])
    assert pending.answer is not None, pending.error
    return pending.answer


def chain(token_ids) -> DraftTree:
    size = len(token_ids)
    return DraftTree(tuple(token_ids), tuple(range(-1, size - 1)), (0.0,) * size, (0,) * size)


def test_a_step_runs_uncached_context_and_nodes_and_nothing_twice(engine):
    prompt, greedy = [5, 4, 3, 2, 1, 9, 8], SamplingParams(prompt_length=7)
    plain = engine.new_session()
    expected: list[int] = []
    while len(expected) < 12:
        base = 0 if not expected else len(prompt) + len(expected) - 1
        verdict = verify(engine, plain, base, [*prompt, *expected][base:], VerifyTask(greedy, EMPTY_DRAFT))
        assert verdict.num_rows == (len(prompt) if not expected else 1)
        expected += verdict.token_ids

    session = engine.new_session()
    first = verify(engine, session, 0, prompt, VerifyTask(greedy, chain(expected[:3])))
    assert (first.num_rows, list(first.token_ids)) == (7 + 3, expected[:4])
    wrong = (expected[6] + 1) % VOCABULARY_SIZE
    second = verify(engine, session, 7, expected[:4], VerifyTask(greedy, chain([*expected[4:6], wrong, 1])))
    # The accepted drafts have their rows already: only the bonus token is new, and then the nodes.
    assert (second.num_rows, list(second.token_ids), second.accepted_nodes) == (1 + 4, expected[4:7], (0, 1))
    again = verify(engine, session, 7, expected[:4], VerifyTask(greedy, chain([*expected[4:6], wrong, 1])))
    assert again.token_ids == second.token_ids, "applying a delta twice is applying it once"
    back = verify(engine, session, 5, prompt[5:], VerifyTask(greedy, EMPTY_DRAFT))
    assert list(back.token_ids) == expected[:1]


def test_long_prefills_take_turns_and_do_not_stall_who_decodes(engine):
    greedy = SamplingParams(prompt_length=1)
    sessions = [engine.new_session() for _ in range(3)]
    verify(engine, sessions[0], 0, [1, 2, 3], VerifyTask(greedy, EMPTY_DRAFT))
    long = [job(s, 0, [7] * 21, VerifyTask(greedy, EMPTY_DRAFT)) for s in sessions[1:]]
    engine.run(long)
    assert not any(pending.done for pending in long)
    decoding = job(sessions[0], 3, [4], VerifyTask(greedy, EMPTY_DRAFT))
    engine.run([*long, decoding])
    assert decoding.done
    for _ in range(20):
        engine.run([pending for pending in long if not pending.done])
        if all(pending.done for pending in long):
            break
    alone = verify(engine, engine.new_session(), 0, [7] * 21, VerifyTask(greedy, EMPTY_DRAFT))
    assert [pending.answer.token_ids for pending in long if pending.answer] == [alone.token_ids] * 2


def test_logits_that_are_no_numbers_end_one_job_only(engine, monkeypatch):
    real = engine._loaded.forward

    def poisoned(segments):
        first, *rest = real(segments)
        return [Output(torch.full_like(first.logits, float("nan")), first.hidden_states), *rest]

    monkeypatch.setattr(engine, "_loaded", SimpleNamespace(forward=poisoned))
    task = VerifyTask(SamplingParams(temperature=1.0, seed=3), EMPTY_DRAFT)
    bad, good = (job(engine.new_session(), 0, [1, 2], task) for _ in range(2))
    engine.run([bad, good])
    assert isinstance(bad.error, RpcError)
    assert bad.error.reason == "NUMERICAL_ERROR"
    assert bad.answer is None
    assert good.answer is not None
    assert good.error is None


def test_observations_are_the_targets_own_hidden_states_and_candidates(engine, folder):
    prompt, greedy = [5, 4, 3, 2, 1, 9, 8], SamplingParams(prompt_length=7)
    drafted = verify(engine, engine.new_session(), 0, prompt, VerifyTask(greedy, EMPTY_DRAFT)).token_ids
    wanted = ObservationRequest(hidden_states=ELEMENT_TYPE_FLOAT32, num_candidates=4)
    verdict = verify(
        engine, engine.new_session(), 0, prompt, VerifyTask(greedy, chain(drafted), None, wanted)
    )
    path = [*prompt, *drafted]
    model = tiny_model("llama")
    with torch.inference_mode():
        hidden = model.model(torch.tensor([path])).last_hidden_state[0]
        best = model(torch.tensor([path])).logits[0].topk(4).indices.tolist()
    seen = [o for o in verdict.observations if o.hidden_states]
    assert [o.first_position for o in seen] == [0, 4, 7], "chunk by chunk, then the accepted node"
    rows = np.concatenate(
        [np.frombuffer(o.hidden_states, np.float32).reshape(o.num_positions, -1) for o in seen]
    )
    np.testing.assert_allclose(rows, hidden.numpy(), atol=1e-4)
    candidates = [c for o in verdict.observations for c in o.candidates]
    assert [(c.token_id, list(c.candidate_ids)) for c in candidates] == [(8, best[6]), (drafted[0], best[7])]
    half = ObservationRequest(hidden_states=ELEMENT_TYPE_FLOAT16)
    [first, *_] = verify(
        engine, engine.new_session(), 0, prompt, VerifyTask(greedy, EMPTY_DRAFT, None, half)
    ).observations
    assert len(first.hidden_states) == first.num_positions * engine.info.hidden_size * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_a_setting(folder, dtype):
    engine = TargetEngine(TargetSettings(folder, dtype=dtype))
    assert (engine.info.dtype, engine.info.weight_format) == (dtype, dtype)
    task = VerifyTask(SamplingParams(prompt_length=3), EMPTY_DRAFT)
    token_ids = verify(engine, engine.new_session(), 0, [1, 2, 3], task).token_ids
    assert verify(engine, engine.new_session(), 0, [1, 2, 3], task).token_ids == token_ids


def test_drafts_beyond_the_batch_lose_their_least_probable_nodes_and_no_token_changes(folder):
    """Three sessions with five nodes each in passes of eight rows: three context rows, five nodes."""
    small = TargetEngine(TargetSettings(folder, max_batch_rows=8))
    greedy = SamplingParams(prompt_length=3)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    expected = []
    for prompt in prompts:
        session = small.new_session()
        token_ids: list[int] = []
        while len(token_ids) < 3:
            base = 0 if not token_ids else 2 + len(token_ids)
            token_ids += verify(
                small, session, base, [*prompt, *token_ids][base:], VerifyTask(greedy, EMPTY_DRAFT)
            ).token_ids
        session.close()
        expected.append(token_ids)

    jobs = []
    for prompt, right, chance in zip(prompts, expected, (-0.1, -0.2, -0.9), strict=True):
        wrong = [(right[0] + 1 + i) % VOCABULARY_SIZE for i in range(3)]
        # The right path stands behind wrong ones that are less probable.
        draft = DraftTree((*wrong, *right[:2]), (-1, -1, -1, -1, 3), (-3.0,) * 3 + (chance,) * 2, (0,) * 5)
        session = small.new_session()
        verify(small, session, 0, prompt[:2], VerifyTask(greedy, EMPTY_DRAFT))
        jobs.append(job(session, 2, prompt[2:], VerifyTask(greedy, draft)))
    small.run(jobs)
    verdicts = [pending.answer for pending in jobs if pending.answer]
    assert [list(verdict.token_ids) for verdict in verdicts] == [expected[0], expected[1], expected[2][:2]]
    assert [verdict.accepted_nodes for verdict in verdicts] == [(3, 4), (3, 4), (3,)]
    assert [verdict.num_nodes for verdict in verdicts] == [2, 2, 1]
    assert [verdict.num_rows for verdict in verdicts] == [3, 3, 2]


def test_a_full_cache_refuses_one_job_before_it_runs_and_others_go_on(folder):
    settings = TargetSettings(folder, max_sessions=2, max_nodes=16)
    with pytest.raises(UnservableModelError, match=r"max_cache_bytes is 1000 and must be at least \d+"):
        TargetEngine(replace(settings, max_cache_bytes=1000))
    engine = TargetEngine(settings)
    row_bytes = engine.info.cache_bytes_per_token
    engine = TargetEngine(replace(settings, max_cache_bytes=3 * BLOCK * row_bytes))
    assert engine.info.max_cache_tokens == 3 * BLOCK - 2 * (BLOCK - 1)
    greedy = SamplingParams(prompt_length=1)
    first = engine.new_session()
    verify(engine, first, 0, [1] * 200, VerifyTask(greedy, EMPTY_DRAFT))
    refused = job(engine.new_session(), 0, [2] * 200, VerifyTask(greedy, EMPTY_DRAFT))
    going = job(first, 200, [3], VerifyTask(greedy, EMPTY_DRAFT))
    engine.run([refused, going])
    assert isinstance(refused.error, RpcError)
    assert refused.error.reason == "CACHE_FULL"
    assert going.answer is not None
    refused.session.close()
    first.close()
    later = engine.new_session()
    assert verify(engine, later, 0, [2] * 200, VerifyTask(greedy, EMPTY_DRAFT)).num_rows == 200
