"""Passes of fixed sizes: what is captured once and repeated gives what a pass of its own size gives."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.causal_lm import head, lean
from services.causal_lm.buckets import SIZES, bucket
from services.causal_lm.forward import Segment
from services.causal_lm.lean import LeanForward
from services.causal_lm.load import load
from services.causal_lm.settings import ModelSettings
from services.causal_lm.weights import read_weights
from tests.models import CONTEXT_LENGTH, VOCABULARY_SIZE, save, tiny_model
from tests.tape import tape
from tests.unit.test_forward import run_batch, sessions

FAMILIES = ["llama", "gpt2", "qwen3"]
TOKENS = [(7 * i + 3) % VOCABULARY_SIZE for i in range(CONTEXT_LENGTH)]


def weights_of(family, dtype=torch.float32):
    return read_weights(tiny_model(family).to(dtype), CONTEXT_LENGTH)


@pytest.fixture(scope="module")
def pairs():
    """By family: passes of their own size, and passes of fixed sizes."""
    made = {}
    for family in FAMILIES:
        weights = weights_of(family)
        made[family] = LeanForward(weights, "float32"), LeanForward(weights, "float32", tape)
    return made


def path(run, token_ids):
    rows = run.new_rows()
    rows.extend(token_ids)
    return rows


@given(st.integers(1, 300))
def test_a_bucket_is_the_smallest_size_that_is_large_enough(num_rows):
    assert bucket(num_rows) == min((size for size in SIZES if size >= num_rows), default=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_rows_gives_what_it_gives_without_buckets(pairs, family):
    own, fixed = pairs[family]
    # Downwards, so that the rows that fill up a bucket hold what a larger pass has left there.
    for num_rows in [255, 256, *range(72, 0, -1)]:
        stores = [path(run, TOKENS[:num_rows]) for run in (own, fixed)]
        for rows in stores:
            rows.keys.fill_(3.0)
            rows.values.fill_(3.0)
        wanted = range(num_rows - 1, -1, -2)
        [expected], [found] = (
            run([Segment(rows, num_rows, wanted)]) for run, rows in zip((own, fixed), stores, strict=True)
        )
        # Caches too, up to their ends: rows that are nobody's are written nowhere.
        for a, b in [
            (found.logits, expected.logits),
            (found.hidden_states, expected.hidden_states),
            (stores[1].keys, stores[0].keys),
            (stores[1].values, stores[0].values),
        ]:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5, msg=lambda text, n=num_rows: f"{n}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(batch=sessions())
def test_ragged_batches_of_trees_give_what_they_give_without_buckets(pairs, family, batch):
    outputs = [
        run_batch(SimpleNamespace(forward=run, new_rows=run.new_rows), batch)[0] for run in pairs[family]
    ]
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=0, atol=1e-5)


def test_matrices_are_multiplied_in_sizes_of_buckets_only(monkeypatch):
    seen = set()

    def recording(linear, weight_format):
        def multiply(rows):
            seen.add(len(rows))
            return torch.nn.functional.linear(rows, linear.weight, linear.bias)

        return multiply

    monkeypatch.setattr(lean, "make_linear", recording)
    monkeypatch.setattr(head, "make_linear", recording)
    run = LeanForward(weights_of("llama"), "float32", lambda work: work)
    for num_rows in range(1, 71):
        sizes = [num_rows, 3 * num_rows % 17 + 1][: 1 + num_rows % 2]
        run([Segment(path(run, TOKENS[:size]), size, range(size // 2)) for size in sizes])
    assert seen == {size for size in SIZES if size <= bucket(70 + 17)}
    seen.clear()
    run([Segment(path(run, TOKENS[:200]), 200, [199]), Segment(path(run, TOKENS[:100]), 100, [])])
    assert seen == {300, 1}, "a pass too large for any bucket has its own size"


def test_what_a_pass_gave_outlives_the_next_one(pairs):
    _, run = pairs["llama"]
    [first] = run([Segment(path(run, TOKENS[:9]), 9, range(9))])
    logits, hidden_states = first.logits.clone(), first.hidden_states.clone()
    run([Segment(path(run, TOKENS[9:18]), 9, range(9))])
    assert torch.equal(first.logits, logits)
    assert torch.equal(first.hidden_states, hidden_states)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_gives_float32_logits_and_passes_the_load_check(family, tmp_path):
    folder = save(tiny_model(family), tmp_path)
    served = load(ModelSettings(folder, dtype="bfloat16", kernel="torch"))
    fixed = LeanForward(weights_of(family, torch.bfloat16), "bfloat16", tape)
    plain = tiny_model(family).to(torch.bfloat16)
    token_ids = TOKENS[:21]
    with torch.inference_mode():
        expected = plain(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    for run in (served, SimpleNamespace(forward=fixed, new_rows=fixed.new_rows)):
        [output] = run.forward([Segment(path(run, token_ids), 21, range(21))])
        assert output.logits.dtype == torch.float32
        assert output.hidden_states.dtype == run.new_rows().keys.dtype == torch.bfloat16
        torch.testing.assert_close(output.logits, expected, rtol=0, atol=5e-2 * float(expected.abs().max()))
    [nothing] = served.forward([Segment(path(served, token_ids), 21, [])])
    assert (nothing.logits.shape, nothing.logits.dtype) == ((0, VOCABULARY_SIZE), torch.float32)
