"""The target's engine: what it computes, what it reports, and one job's fault staying with that job."""

import numpy as np
import pytest
import torch

import services.target.engine
from services.causal_lm.packed import Output
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
    real = services.target.engine.forward

    def poisoned(model, segments):
        first, *rest = real(model, segments)
        return [Output(torch.full_like(first.logits, float("nan")), first.hidden_states), *rest]

    monkeypatch.setattr(services.target.engine, "forward", poisoned)
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
