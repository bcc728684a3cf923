"""The fast sampler against the slow one, and both against the distribution they promise."""

import math

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.sampling import History, draw, logprobs
from services.target.accept import walk
from stagespec.rpc import RpcError
from stagespec.tree import ROOT, DraftTree
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.oracle import oracle_distribution, oracle_draw

VOCABULARY_SIZE = 12
IDS = np.arange(VOCABULARY_SIZE)
TOKEN = st.integers(0, VOCABULARY_SIZE - 1)
# Quarters make ties common, so that the rules for ties are exercised.
LOGITS = st.lists(
    st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCABULARY_SIZE, max_size=VOCABULARY_SIZE
)


@st.composite
def sampling_params(draw):
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-320, 1e-12, 0.5, 1.0, 1.7])),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt_length=draw(st.integers(0, 3)),
        min_tokens=draw(st.integers(0, 5)),
        end_token_ids=draw(st.lists(TOKEN, max_size=3)),
        logit_bias=draw(st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3)),
    )
    options = {
        "top_k": st.integers(1, VOCABULARY_SIZE + 1),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.6]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.7]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
    }
    for name, values in options.items():
        if draw(st.booleans()):
            setattr(params, name, draw(values))
    return params


@settings(max_examples=500)
@given(LOGITS, sampling_params(), st.lists(TOKEN, min_size=3, max_size=10), st.integers(0, 6))
def test_draw_equals_the_slow_one_along_a_path(logits, params, context, num_drafted):
    history = History(params, context[: len(context) - min(num_drafted, len(context) - 3)])
    for token_id in context[len(context) - min(num_drafted, len(context) - 3) :]:
        history.append(token_id)
    values = np.array(logits, dtype=np.float32)
    found = draw(IDS, values, params, history, len(context))
    assert found == oracle_draw(logits, params, context, len(context))


@given(st.integers(300, 6000), st.floats(0.05, 0.999), st.integers(0, 2**32))
def test_a_large_vocabulary_is_cut_like_a_small_one(size, top_p, seed):
    logits = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_p=top_p, seed=seed)
    found = draw(np.arange(size), logits, params, History(params, [0]), 1)
    assert found == oracle_draw(logits.astype(float).tolist(), params, [0], 1)


def target_logits(path: tuple[int, ...]) -> list[float]:
    """A target whose second token depends on the first."""
    return [math.sin(1.7 * token_id + 2.3 * sum(path) + len(path)) * 2 for token_id in range(6)]


TREES = {
    "empty": DraftTree(),
    "greedy chain": DraftTree((3, 2), (-1, 0), (0.0,) * 2, (0,) * 2),
    "bushy": DraftTree((0, 1, 2, 0, 4, 5, 3), (-1, -1, -1, 0, 0, 1, -1), (0.0,) * 7, (0,) * 7),
}
NUM_SEEDS = 50_000  # two draws each
PARAMS = SamplingParams(temperature=0.9, top_k=5, top_p=0.93, presence_penalty=0.6, prompt_length=1)
CONTEXT = [5, 1]
TABLE = {
    path: np.array(target_logits(path), dtype=np.float32) for path in [(), *((first,) for first in range(6))]
}


def two_tokens(tree: DraftTree, seed: int) -> tuple[int, int]:
    """Decodes two positions, the first of them with a draft."""
    params = SamplingParams()
    params.CopyFrom(PARAMS)
    params.seed = seed
    committed: list[int] = []
    while len(committed) < 2:
        history = History(params, CONTEXT + committed)
        path = list(committed)

        def draw_after(node: int, history: History = history, path: list[int] = path) -> int:
            if node != ROOT:
                history.append(tree.token_ids[node])
            if len(path) == 2:
                return 0  # beyond what is looked at
            token_id = draw(IDS[:6], TABLE[tuple(path)], params, history, len(CONTEXT) + len(path))
            path.append(token_id)
            return token_id

        committed += walk(DraftTree() if committed else tree, draw_after)[1]
    return committed[0], committed[1]


def test_committed_tokens_have_the_processed_distribution_jointly():
    """Chi-square over both positions together; the fixed seeds make the outcome certain."""
    counts = np.zeros((6, 6), dtype=np.int64)
    for seed in range(NUM_SEEDS):
        counts[two_tokens(TREES["bushy"], seed)] += 1
    first = oracle_distribution(target_logits(()), PARAMS, CONTEXT)
    second = [
        oracle_distribution(target_logits((token_id,)), PARAMS, [*CONTEXT, token_id]) for token_id in range(6)
    ]
    expected = np.array(first)[:, None] * np.array(second) * NUM_SEEDS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert freedom > 10
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_the_tree_does_not_change_a_draw():
    for seed in range(1000):
        assert len({two_tokens(tree, seed) for tree in TREES.values()}) == 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-308, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, min_p=0.1)
    for logits, best in (([1, 2, 30, 4], 2), ([-9, -8, -1, -7], 2), ([1e30, 2, 3, 4], 0)):
        values = np.array(logits, dtype=np.float32)
        assert draw(np.arange(4), values, params, History(params, []), 0) == best


def test_logits_that_cannot_be_sampled_from_end_the_request():
    for logits in ([np.nan] * 3, [-np.inf] * 3, [np.inf, 0, 0]):
        with pytest.raises(RpcError) as caught:
            draw(
                np.arange(3),
                np.array(logits, dtype=np.float32),
                SamplingParams(),
                History(SamplingParams(), []),
                0,
            )
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR")


@given(LOGITS, TOKEN, st.integers(0, 5))
def test_logprobs_are_the_raw_log_softmax(logits, token_id, num_top):
    entry = logprobs(np.array(logits, dtype=np.float32), token_id, num_top)
    total = math.log(sum(math.exp(value) for value in logits))
    assert entry.log_prob == pytest.approx(logits[token_id] - total, abs=1e-6)
    ranked = sorted(range(VOCABULARY_SIZE), key=lambda t: (-logits[t], t))[:num_top]
    assert list(entry.top_token_ids) == ranked
    assert list(entry.top_log_probs) == pytest.approx([logits[t] - total for t in ranked], abs=1e-6)
