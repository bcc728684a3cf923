"""The compiled kernel's life: built once for the processor, replaced by torch's where it cannot be."""

import logging
import platform

import pytest
import torch

from services.causal_lm.check import UnservableModelError
from services.causal_lm.forward import Segment
from services.causal_lm.lean import LeanForward
from services.causal_lm.load import load
from services.causal_lm.native import library
from services.causal_lm.native.forward import NativeForward
from services.causal_lm.settings import ModelSettings
from services.causal_lm.weights import read_weights
from tests.models import VOCABULARY_SIZE, save, tiny_model


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache, and a loader that has not looked for the library yet."""
    monkeypatch.setenv("STAGESPEC_CACHE", str(tmp_path / "cache"))
    library.native_library.cache_clear()
    yield tmp_path
    library.native_library.cache_clear()


def test_it_is_compiled_once_and_then_loaded(fresh, monkeypatch):
    first = library.native_library()
    assert first is not None
    [made] = (fresh / "cache/native").iterdir()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    library.native_library.cache_clear()
    assert library.native_library() is not None
    assert [made] == list((fresh / "cache/native").iterdir())


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "failed: exit code 1")]
)
def test_without_a_compiler_it_says_so_once_and_torch_serves(fresh, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    folder = save(tiny_model("llama"), fresh / "model")
    with caplog.at_level(logging.WARNING, logger=library.__name__):
        assert [load(ModelSettings(folder)).kernel for _ in range(2)] == ["torch", "torch"]
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(UnservableModelError, match="kernel 'native' cannot run"):
        load(ModelSettings(folder, kernel="native"))


def test_models_of_other_families_run_through_their_own_code(tmp_path):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    folder = save(model.eval(), tmp_path)
    for weight_format in ("float32", "float16", "int8"):
        loaded = load(ModelSettings(folder, weight_format=weight_format))
        assert (loaded.kernel, loaded.info.weight_format) == ("generic", weight_format)
    with pytest.raises(UnservableModelError, match="kernel 'torch' cannot run"):
        load(ModelSettings(folder, kernel="torch"))


# What processors with fewer instructions run: eight lanes, and four without fused multiply-add or half.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("weight_format", ["float32", "float16", "int8"])
def test_every_instruction_set_gives_the_same_model(level, family, weight_format):
    model = tiny_model(family)
    weights = read_weights(model, 128)
    assert weights is not None
    token_ids = [(7 * i + 3) % VOCABULARY_SIZE for i in range(70)]
    found = []
    with torch.inference_mode():
        for run in (
            LeanForward(weights, weight_format),
            NativeForward(library.load((f"-march={level}",)), weights, weight_format, 2),
        ):
            rows = run.new_rows()
            for token_id in token_ids:
                rows.add(len(rows) - 1, token_id)
            rows.grow_path(len(rows))
            [whole] = run([Segment(rows, 70, range(70))])
            found.append(whole)
            if isinstance(run, NativeForward):
                rows.truncate(40)
                for token_id in token_ids[40:45]:
                    rows.add(len(rows) - 1, token_id)
                [part] = run([Segment(rows, 5, range(5))])  # drafted, not yet context
                assert torch.equal(part.logits, whole.logits[40:45])
    spread = (found[0].logits - found[1].logits).abs()
    # In the 8-bit format the last bit of a sum decides now and then how an input is rounded.
    assert spread.max() < (2e-3 if weight_format == "int8" else 1e-4)
