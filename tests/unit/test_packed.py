"""Tree attention against the obvious: each root-to-node path alone through the unmodified model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.causal_lm.check import UnservableModelError
from services.causal_lm.load import load
from services.causal_lm.packed import Segment, forward
from services.causal_lm.prepack import PrepackedLinear
from services.causal_lm.settings import ModelSettings
from tests.models import VOCABULARY_SIZE, save, tiny_model

FAMILIES = ["llama", "gpt2", "qwen2", "mistral"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """For each family the model as transformers loads it, and as we serve it."""
    pairs = {}
    for family in FAMILIES:
        plain = tiny_model(family)
        plain.set_attn_implementation("eager")
        pairs[family] = plain, load(ModelSettings(save(plain, tmp_path_factory.mktemp(family))))
    return pairs


@st.composite
def sessions(draw):
    """Several sessions at once: a context, where it is cut into chunks, and a tree."""
    token = st.integers(0, VOCABULARY_SIZE - 1)
    found = []
    for _ in range(draw(st.integers(1, 3))):
        context = draw(st.lists(token, min_size=1, max_size=12))
        size = draw(st.integers(0, 7))
        tree = [(draw(st.integers(-1, i - 1)), draw(token)) for i in range(size)]
        found.append((context, draw(st.integers(0, len(context) - 1)), tree))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(batch=sessions())
def test_packed_trees_equal_their_paths_run_alone(loaded, family, batch):
    plain, served = loaded[family]
    stores = [served.new_rows() for _ in batch]
    first_chunks, segments, paths = [], [], []
    for rows, (context, cut, _) in zip(stores, batch, strict=True):
        for token_id in context[:cut]:
            rows.add(len(rows) - 1, token_id)
        rows.grow_path(cut)
        if cut:
            first_chunks.append(Segment(rows, cut, []))
    if first_chunks:
        forward(served.model, first_chunks)
    for rows, (context, cut, tree) in zip(stores, batch, strict=True):
        for token_id in context[cut:]:
            rows.add(len(rows) - 1, token_id)
        rows.grow_path(len(context))
        spelled: list[tuple[int, list[int]]] = []
        for parent, token_id in tree:
            at, prefix = (len(context) - 1, context) if parent < 0 else spelled[parent]
            row = rows.find(at, token_id)
            spelled.append((rows.add(at, token_id) if row is None else row, [*prefix, token_id]))
        unique = dict(spelled)
        num_new = len(context) - cut + len(unique)
        segments.append(Segment(rows, num_new, range(len(context) - cut - 1, num_new)))
        paths.append([context, *(unique[row] for row in sorted(unique))])
    for output, expected in zip(forward(served.model, segments), paths, strict=True):
        for logits, path in zip(output.logits, expected, strict=True):
            with torch.inference_mode():
                alone = plain(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 96), (576, 1536), (1536, 576)])
def test_prepacked_rows_do_not_depend_on_the_batch(shape):
    generator = torch.Generator().manual_seed(0)
    layer = PrepackedLinear(
        torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    )
    rows = torch.randn(64, shape[1], generator=generator)
    whole = layer(rows)
    for size in range(1, 65):
        assert torch.equal(layer(rows[:size]), whole[:size]), size


def test_models_that_cannot_be_branched_are_refused_by_name(tmp_path):
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    llama = {
        **size,
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    cases = {
        "sliding window": MistralForCausalLM(MistralConfig(**llama, sliding_window=16)),
        "context length": LlamaForCausalLM(LlamaConfig(**llama, rope_parameters=rope)),
        "positions": BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)),
    }
    for reason, model in cases.items():
        folder = save(model, tmp_path / reason.replace(" ", "_"))
        with pytest.raises(UnservableModelError, match=reason) as caught:
            load(ModelSettings(folder))
        assert folder in str(caught.value)
    within = ModelSettings(str(tmp_path / "sliding_window"), max_context_length=16)
    assert load(within).info.max_context_length == 16
    with pytest.raises(UnservableModelError, match="max_context_length is 4096"):
        load(ModelSettings(save(tiny_model("llama"), tmp_path / "llama"), max_context_length=4096))
    with pytest.raises(UnservableModelError, match="cannot be loaded"):
        load(ModelSettings(str(tmp_path / "nothing_here")))


def test_a_wrong_cache_fails_the_load_check(tmp_path, monkeypatch):
    from services.causal_lm.rows import Rows

    folder = save(tiny_model("llama"), tmp_path)
    position = Rows.position
    monkeypatch.setattr(Rows, "position", lambda rows, row: position(rows, row) + (row >= rows.path_length))
    with pytest.raises(UnservableModelError, match="differ by"):
        load(ModelSettings(folder))
