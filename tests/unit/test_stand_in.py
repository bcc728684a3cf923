"""The stand-in draft: the target's own layers, and a head fitted to them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.gguf_model import split_digits
from deploy.stand_in import fit_head, make_stand_in
from tests.models import VOCABULARY_SIZE, save, tiny_model


def logits(folder, token_ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_stand_in_is_the_target_with_fewer_layers(family, tmp_path):
    target = tiny_model(family)
    save(target, tmp_path / "target")
    make_stand_in(tmp_path / "target", tmp_path / "draft", [1])
    layers = target.base_model.h if family == "gpt2" else target.base_model.layers
    del layers[0]
    target.config.num_hidden_layers = 1
    with torch.inference_mode():
        expected = target(torch.tensor([[1, 2, 3]]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(tmp_path / "draft", [1, 2, 3]), expected)
    for wrong in ([], [0, 2], [-1]):
        with pytest.raises(ValueError, match="from 0 to 1"):
            make_stand_in(tmp_path / "target", tmp_path / "none", wrong)


def test_a_fitted_head_reads_the_layers_as_the_targets_head_would(tmp_path):
    save(tiny_model("llama"), tmp_path / "target")
    texts = torch.randint(0, VOCABULARY_SIZE, (40, 32), generator=torch.Generator().manual_seed(0)).tolist()
    errors = []
    for fitted in (False, True):
        make_stand_in(tmp_path / "target", tmp_path / "draft", [0])
        if fitted:
            fit_head(tmp_path / "target", tmp_path / "draft", texts)
        found = logits(tmp_path / "draft", texts[0]).log_softmax(-1)
        expected = logits(tmp_path / "target", texts[0]).softmax(-1)
        errors.append(float(torch.nn.functional.kl_div(found, expected, reduction="batchmean")))
    assert errors[1] < 0.7 * errors[0]
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["tie_word_embeddings"] is False


def test_digits_are_split_before_the_tokenizer_merges_them():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"1": 0, "2": 1, "12": 2, "Ġ": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode("12").ids == [2]
    split_digits(tokenizer)
    assert tokenizer.encode("12").ids == [0, 1]
