"""Turns a GGUF file of a Llama-family model into a Hugging Face model folder.

Weights are dequantized here rather than by transformers, which refuses to save what it loaded from GGUF and
takes longer. It does not know where the file came from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.model_libraries import quiet

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(gguf: Path, output: Path, *, name: str) -> None:
    """Writes weights, configuration, tokenizer and chat template of a GGUF model.

    Weights are rounded to float16 in the file, which halves it and adds less error than the quantization it
    came from; the configuration says float32, and that is what they are loaded as, exactly.

    Args:
        gguf: The file.
        output: Folder to write to; made if need be.
        name: Name of the model for its configuration.

    Raises:
        ValueError: Another architecture than Llama, or a tensor with no place in it.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig

    quiet()
    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ValueError(f"{gguf.name} has the architecture {architecture!r}; only 'llama' can be converted")
    special = {
        part: reader.fields[f"tokenizer.ggml.{part}_token_id"].contents()
        for part in ("bos", "eos", "padding")
        if f"tokenizer.ggml.{part}_token_id" in reader.fields
    }
    weights = {
        _name(tensor.name): torch.from_numpy(_weight(tensor, fields).astype(np.float16))
        for tensor in reader.tensors
    }
    config = _config(fields, special, tied="lm_head.weight" not in weights)
    config.name_or_path = name
    config.architectures = ["LlamaForCausalLM"]

    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(output)
    GenerationConfig(
        bos_token_id=special.get("bos"), eos_token_id=special["eos"], pad_token_id=special.get("padding")
    ).save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The kind of pre-tokenizer is in the file, but transformers builds a plain byte-level one from any.
    if reader.fields["tokenizer.ggml.pre"].contents() == "smollm":
        split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(output)


def split_digits(tokenizer: Any) -> None:
    r"""Makes a `tokenizers.Tokenizer` split every digit off before its own pre-tokenizer runs.

    SmolLM was trained so; without it "\n    5" becomes other tokens than the model ever saw.
    """
    from tokenizers.pre_tokenizers import Digits, Sequence

    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), tokenizer.pre_tokenizer])


def _config(fields: Mapping[str, Any], special: Mapping[str, int], *, tied: bool) -> Any:
    from transformers import LlamaConfig

    heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=special.get("bos"),
        eos_token_id=special["eos"],
        pad_token_id=special.get("padding"),
        dtype="float32",
    )


def _name(gguf_name: str) -> str:
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP_PARTS:
        return f"{_TOP_PARTS[stem]}.{suffix}"
    block, _, part = stem.partition(".")
    layer, _, part = part.partition(".")
    if block != "blk" or part not in _LAYER_PARTS:
        raise ValueError(f"tensor {gguf_name!r} has no place in a Llama model")
    return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{suffix}"


def _weight(tensor: Any, fields: Mapping[str, Any]) -> NDArray[np.float32]:
    """The tensor as float32, [rows, columns] or [columns], rows in the order transformers expects."""
    from gguf import dequantize

    weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if part == "attn_q":
        return _unpermute(weight, fields["llama.attention.head_count"])
    if part == "attn_k":
        return _unpermute(weight, fields["llama.attention.head_count_kv"])
    return weight


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    # GGUF keeps the two rows that a rotation mixes side by side; transformers keeps them half a head apart.
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
