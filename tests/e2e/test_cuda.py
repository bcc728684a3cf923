"""A GPU's path, from captured graphs to token streams: `pytest -m cuda -s tests/e2e/test_cuda.py`.

The same runs on the CPU, captured on a tape; only the device differs. In half precision streams may part
where two tokens are close: how close is printed.
"""

import pytest
import torch

from services.causal_lm.buckets import SIZES
from services.causal_lm.check import TOLERANCES
from services.causal_lm.forward import Segment
from services.causal_lm.graphs import capture_for
from services.causal_lm.lean import LeanForward
from services.causal_lm.weights import read_weights
from services.draft.engine import DraftEngine
from services.draft.settings import DraftSettings
from services.engine import Job, ProposeTask, VerifyTask
from services.target.engine import TargetEngine
from services.target.settings import TargetSettings
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.observation_pb2 import ELEMENT_TYPE_BFLOAT16, ObservationRequest
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.models import CONTEXT_LENGTH, VOCABULARY_SIZE, save, tiny_model
from tests.tape import tape

CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CASES = [("cpu", "float32", "llama"), ("cpu", "bfloat16", "gpt2")]
CASES += [
    pytest.param("cuda:0", dtype, family, marks=CUDA)
    for dtype in ("float32", "bfloat16")
    for family in ("llama", "gpt2")
]
cases = pytest.mark.parametrize(("device", "dtype", "family"), CASES)
TOKENS = [(7 * i + 3) % VOCABULARY_SIZE for i in range(CONTEXT_LENGTH)]
PROMPT = TOKENS[:11]
NUM_TOKENS = 60


def captured_and_eager(family, device, dtype):
    model = tiny_model(family).to(device, getattr(torch, dtype))
    weights = read_weights(model, CONTEXT_LENGTH)
    captured = LeanForward(weights, dtype, capture_for(torch.device(device)) or tape)
    eager = LeanForward(weights, dtype)
    eager._capture = None
    return captured, eager


def path(run, token_ids):
    rows = run.new_rows()
    rows.extend(token_ids)
    return rows


@cases
def test_what_is_captured_for_a_size_gives_what_runs_as_it_is(device, dtype, family):
    captured, eager = captured_and_eager(family, device, dtype)
    sizes = SIZES if device.startswith("cuda") else SIZES[:6]
    for size in [*sizes, *(size - 1 for size in sizes if size > 2)]:
        for _ in range(2):  # a graph that spoils its own inputs is wrong the second time
            pair = []
            for run in (captured, eager):
                rows = path(run, TOKENS[:size])
                [output] = run([Segment(rows, size, range(size))])
                pair += [(output.logits, output.hidden_states.float(), rows.keys[:, :, :size].float())]
            assert pair[0][0].dtype == torch.float32
            for found, expected in zip(*pair, strict=True):
                error = float((found - expected).abs().max() / expected.abs().max())
                assert error <= TOLERANCES[dtype], size


@cases
def test_trees_give_what_their_paths_give_alone(device, dtype, family):
    captured, eager = captured_and_eager(family, device, dtype)
    parents = [-1, -1, 0, 0, 2, 1, 4, 6, -1]
    rows, other = path(captured, PROMPT), path(captured, TOKENS[20:52])
    nodes: list[int] = []
    paths: list[list[int]] = []
    for token_id, parent in zip(TOKENS[60:], parents, strict=False):
        nodes.append(rows.add(len(PROMPT) - 1 if parent < 0 else nodes[parent], token_id))
        paths.append([*(PROMPT if parent < 0 else paths[parent]), token_id])
    segments = [
        Segment(rows, len(rows), range(len(PROMPT), len(rows))),
        Segment(other, len(other), [len(other) - 1]),
    ]
    outputs = captured(segments)
    found = [*outputs[0].logits, *outputs[1].logits]
    for logits, token_ids in zip(found, [*paths, TOKENS[20:52]], strict=True):
        [alone] = eager([Segment(path(eager, token_ids), len(token_ids), [len(token_ids) - 1])])
        error = float((logits - alone.logits[0]).abs().max() / alone.logits.abs().max())
        assert error <= TOLERANCES[dtype]


@cases
def test_speculative_streams_are_plain_ones_or_part_where_two_tokens_are_close(
    device, dtype, family, tmp_path
):
    # The pass with graphs is the first choice, and is still chosen when the load check has run it.
    kernel = "auto" if device.startswith("cuda") else "torch"
    folder = save(tiny_model(family), tmp_path)
    engine = TargetEngine(
        TargetSettings(folder, device=device, dtype=dtype, kernel=kernel, num_threads=1, prefill_chunk=8)
    )
    assert engine.info.kernel == "torch"
    plain = generate(engine, lambda done: EMPTY_DRAFT)
    drafts = {
        "right": lambda done: chain(plain[done : done + 7]),
        "half right": lambda done: chain([*plain[done : done + 3], 0, 1, 2]),
        "wrong": lambda done: chain([(plain[min(done, NUM_TOKENS - 1)] + 1) % VOCABULARY_SIZE] * 5),
    }
    for name, draft in drafts.items():
        found = generate(engine, draft)
        parted = first_difference(engine, plain, found)
        if parted is None:
            print(f"{family}, {dtype}, {device}, {name} drafts: the same {NUM_TOKENS} tokens")
            continue
        position, margin, largest = parted
        print(
            f"{family}, {dtype}, {device}, {name} drafts: parted at token {position} "
            f"with a margin of {margin:.2e} in logits of up to {largest:.1f}"
        )
        assert margin <= 2 * TOLERANCES[dtype] * largest


def generate(engine, draft):
    """Greedy tokens of one session, with drafts made from the number of tokens so far."""
    sampling = SamplingParams(prompt_length=len(PROMPT))
    session = engine.new_session()
    context, base = list(PROMPT), 0
    observed = ObservationRequest(hidden_states=ELEMENT_TYPE_BFLOAT16, num_candidates=4)
    while len(context) < len(PROMPT) + NUM_TOKENS:
        task = VerifyTask(sampling, draft(len(context) - len(PROMPT)), 2, observed)
        verdict = run_job(engine, session, base, context[base:], task)
        base = len(context)
        context += verdict.token_ids
    session.close()
    return context[len(PROMPT) :][:NUM_TOKENS]


def run_job(engine, session, base, token_ids, task):
    session.apply(base, token_ids)
    job = Job(session, task, base, token_ids)
    while not job.done:
        engine.run([job])
    assert job.answer is not None, job.error
    return job.answer


def chain(token_ids):
    size = len(token_ids)
    return DraftTree(tuple(token_ids), tuple(range(-1, size - 1)), (0.0,) * size, (0,) * size)


def first_difference(engine, plain, found):
    """Position, margin between the two tokens there, and the largest logit; None where there is none."""
    position = next((i for i, pair in enumerate(zip(plain, found, strict=True)) if pair[0] != pair[1]), None)
    if position is None:
        return None
    context = [*PROMPT, *plain[:position]]
    rows = engine._loaded.new_rows()
    rows.extend(context)
    [output] = engine._loaded.forward([Segment(rows, len(context), [len(context) - 1])])
    logits = output.logits[0]
    margin = abs(float(logits[plain[position]] - logits[found[position]]))
    return position, margin, float(logits.abs().max())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=CUDA)])
def test_drafts_are_those_of_the_cpu(device, family, tmp_path):
    folder = save(tiny_model(family), tmp_path)
    proposals = []
    for where in ("cpu", device):
        engine = DraftEngine(DraftSettings(folder, device=where, kernel="torch"))
        sampling = SamplingParams(prompt_length=len(PROMPT), temperature=0.7, seed=5)
        session = engine.new_session()
        task = ProposeTask(sampling, chain(TOKENS[11:14]), Budget(max_nodes=12, max_depth=4), 1)
        proposals.append(run_job(engine, session, 0, PROMPT, task).draft)
        session.close()
    expected, found = proposals
    assert len(found) == 12
    assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
    assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-3)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=CUDA)])
def test_memory_stays_flat(device):
    captured, _ = captured_and_eager("llama", device, "bfloat16")
    taken = []
    for step in range(60):
        size = step % 20 + 1
        captured([Segment(path(captured, TOKENS[:size]), size, range(size))])
        taken.append(torch.cuda.memory_allocated(device))
    assert taken[20:40] == taken[40:60]
