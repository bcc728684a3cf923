"""Tree attention against the obvious: each root-to-node path alone through the unmodified model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.causal_lm.check import UnservableModelError
from services.causal_lm.formats import as_served
from services.causal_lm.forward import Segment
from services.causal_lm.linears import agreeing_sizes, make_linear
from services.causal_lm.load import load
from services.causal_lm.settings import ModelSettings
from services.causal_lm.weights import Linear
from tests.models import VOCABULARY_SIZE, save, tiny_model

FAMILIES = ["llama", "gpt2", "qwen2", "qwen3", "mistral"]
KERNELS = ["native", "torch", "generic"]
WEIGHT_FORMATS = ["float32", "float16", "int8"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: save(tiny_model(family), tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def loaded(folders):
    """The model as transformers computes it with the numbers that are served, and as we serve it."""
    pairs = {}

    def get(family, kernel, weight_format):
        key = family, kernel, weight_format
        if key not in pairs:
            plain = tiny_model(family)
            plain.set_attn_implementation("eager")
            settings = ModelSettings(folders[family], kernel=kernel, weight_format=weight_format)
            pairs[key] = as_served(plain, weight_format), load(settings)
            assert pairs[key][1].kernel == kernel
        return pairs[key]

    return get


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


CASES = [(family, kernel, "float32") for family in FAMILIES for kernel in KERNELS]
CASES += [("llama", kernel, weight_format) for kernel in KERNELS for weight_format in ("float16", "int8")]
CASES += [("gpt2", kernel, "float16") for kernel in KERNELS]


@pytest.mark.parametrize(("family", "kernel", "weight_format"), CASES)
@settings(max_examples=10, deadline=None)
@given(batch=sessions())
def test_trees_equal_their_paths_run_alone_in_transformers(loaded, family, kernel, weight_format, batch):
    plain, served = loaded(family, kernel, weight_format)
    # In the 8-bit format the last bit of a sum decides now and then how an input is rounded.
    tolerance = 2e-3 if weight_format == "int8" else 1e-4
    for output, paths in zip(*run_batch(served, batch), strict=True):
        for logits, path in zip(output.logits, paths, strict=True):
            with torch.inference_mode():
                alone = plain(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits, alone, rtol=0, atol=tolerance)


def run_batch(served, batch):
    """Runs contexts in two chunks, then the rest of them and their trees; returns outputs and paths."""
    stores = [served.new_rows() for _ in batch]
    first_chunks, segments, paths = [], [], []
    for rows, (context, cut, _) in zip(stores, batch, strict=True):
        for token_id in context[:cut]:
            rows.add(len(rows) - 1, token_id)
        rows.grow_path(cut)
        if cut:
            first_chunks.append(Segment(rows, cut, []))
    if first_chunks:
        served.forward(first_chunks)
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
    return served.forward(segments), paths


@pytest.mark.parametrize(
    ("family", "weight_format"),
    [
        *(("llama", weight_format) for weight_format in WEIGHT_FORMATS),
        ("gpt2", "float16"),
        ("qwen3", "float32"),
    ],
)
@settings(max_examples=20, deadline=None)
@given(batch=sessions())
def test_native_rows_are_bitwise_what_their_path_alone_gives(loaded, family, weight_format, batch):
    _, served = loaded(family, "native", weight_format)
    for output, paths in zip(*run_batch(served, batch), strict=True):
        for logits, path in zip(output.logits, paths, strict=True):
            rows = served.new_rows()
            for token_id in path:  # plain decoding: one token a pass
                rows.add(len(rows) - 1, token_id)
                rows.grow_path(len(rows))
                [alone] = served.forward([Segment(rows, 1, [0])])
            assert torch.equal(logits, alone.logits[0])


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_rows_do_not_depend_on_batch_size_threads_or_long_contexts(
    folders, loaded, weight_format, num_threads
):
    _, served = loaded("llama", "native", weight_format)
    settings = ModelSettings(folders["llama"], weight_format=weight_format, num_threads=num_threads)
    other = load(settings)
    token_ids = [(7 * i + 3) % VOCABULARY_SIZE for i in range(200)]
    rows = served.new_rows()
    for token_id in token_ids:
        rows.add(len(rows) - 1, token_id)
    rows.grow_path(len(rows))
    [whole] = served.forward([Segment(rows, 200, range(200))])
    done = 0
    rows = other.new_rows()
    for size in [*range(1, 16), 80]:
        for token_id in token_ids[done : done + size]:
            rows.add(len(rows) - 1, token_id)
        rows.grow_path(len(rows))
        [part] = other.forward([Segment(rows, size, range(size))])
        assert torch.equal(part.logits, whole.logits[done : done + size]), size
        assert torch.equal(part.hidden_states, whole.hidden_states[done : done + size]), size
        done += size
    assert done == 200


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(64, 96), (576, 1536), (1536, 576)])
def test_rows_of_a_linear_layer_do_not_depend_on_the_batch(shape, weight_format):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    layer = make_linear(Linear(weight, bias), weight_format)
    rows = torch.randn(150, shape[1], generator=generator)
    whole = layer(rows)
    for size in [*range(1, 65), 100, 128]:
        assert torch.equal(layer(rows[:size]), whole[:size]), size
    plain = torch.nn.Sequential(torch.nn.Linear(*reversed(shape)))
    with torch.no_grad():
        plain[0].weight.copy_(weight)
        plain[0].bias.copy_(bias)
        torch.testing.assert_close(whole, as_served(plain, weight_format)(rows), rtol=1e-4, atol=1e-3)


def test_sizes_that_sum_in_another_order_are_found():
    def multiply(rows):
        return rows.sum(1, keepdim=True) + (1e-7 if len(rows) in (1, 7) else 0.0) * rows[:, :1]

    assert set(range(1, 65)) - set(agreeing_sizes(multiply, 32)) == {1, 7}


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
        load(ModelSettings(folder, kernel="generic"))
    # Llama's other kernels are tried first; the C kernel finds positions by itself, and is right.
    assert load(ModelSettings(folder)).kernel == "native"
    with pytest.raises(UnservableModelError, match="differ by"):
        load(ModelSettings(folder, kernel="torch"))
