"""Tiny random models, made in the test that needs them."""

from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY_SIZE = 128
CONTEXT_LENGTH = 256

_LLAMA = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.3,  # wide enough that the best tokens are far apart
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family: "llama", "mistral", "qwen2", "qwen3" or "gpt2"."""
    torch.manual_seed(seed)
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY_SIZE,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT_LENGTH,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
        return GPT2LMHeadModel(config).eval()
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**_LLAMA, sliding_window=None)).eval()
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**_LLAMA)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_LLAMA, head_dim=16)).eval()
    return LlamaForCausalLM(LlamaConfig(**_LLAMA)).eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    """Writes a model where a stage can load it."""
    model.save_pretrained(folder)
    return str(folder)


def noisy_copy(model: PreTrainedModel, scale: float, seed: int = 1) -> PreTrainedModel:
    """A draft that often agrees: the same weights plus noise. Random models alone accept nothing."""
    generator = torch.Generator().manual_seed(seed)
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return copy
