"""The weights of a Llama or GPT-2 model, as the lean forward passes read them.

It knows where transformers keeps them; it computes nothing. Other families run through their own code.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

LLAMA_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GPT2_FAMILY = ("GPT2LMHeadModel",)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation: with a bias a layer norm, without one an RMS norm. [hidden]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer. [num_outputs, num_inputs], and [num_outputs] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        norm1: Before attention.
        qkv: Queries of all heads, then keys, then values.
        query_norm: Over each head's query, or None.
        key_norm: Over each head's key, or None.
        output: After attention.
        norm2: Before the feed-forward part.
        up: Into the feed-forward part. In a gated model the gates, then the values they scale.
        down: Out of it.
    """

    norm1: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    norm2: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model.

    Attributes:
        embedding: [vocab, hidden]
        position_embedding: [max_length, hidden] or None.
        cosines: Of the rotary positions, or None. [max_length, head_dim]
        sines: Likewise.
        layers: In order.
        norm: After the last layer.
        head: [vocab, hidden]
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        epsilon: Of every norm.
        gated: Whether `up` holds gates (SiLU); else the activation is GELU in its tanh form.
    """

    embedding: Tensor
    position_embedding: Tensor | None
    cosines: Tensor | None
    sines: Tensor | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    gated: bool


@torch.inference_mode()
def read_weights(model: PreTrainedModel, max_length: int) -> Weights | None:
    """Collects a model's weights, with layers that read the same input fused.

    Args:
        model: As transformers loaded it. Weights that are not fused are shared with it.
        max_length: Positions that will be used.

    Returns:
        None for a model of another family, or with options that the lean passes lack.
    """
    name = type(model).__name__
    if name in LLAMA_FAMILY:
        return _read_llama(model, max_length)
    return _read_gpt2(model) if name in GPT2_FAMILY else None


def _read_llama(model: Any, max_length: int) -> Weights | None:
    config, base = model.config, model.model
    if config.hidden_act != "silu":
        return None
    attention = base.layers[0].self_attn
    positions = torch.arange(max_length, device=base.embed_tokens.weight.device).unsqueeze(0)
    cosines, sines = base.rotary_emb(torch.zeros(1, device=positions.device), positions)
    if cosines.shape[-1] != attention.head_dim:
        return None
    return Weights(
        embedding=base.embed_tokens.weight.detach(),
        position_embedding=None,
        cosines=cosines[0].float(),
        sines=sines[0].float(),
        layers=tuple(_llama_layer(layer) for layer in base.layers),
        norm=_norm(base.norm),
        head=_linear(model.lm_head),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        epsilon=config.rms_norm_eps,
        gated=True,
    )


def _llama_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else _norm(norm) for norm in norms)
    return Layer(
        norm1=_norm(layer.input_layernorm),
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=query_norm,
        key_norm=key_norm,
        output=_linear(attention.o_proj),
        norm2=_norm(layer.post_attention_layernorm),
        up=_fused(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _read_gpt2(model: Any) -> Weights | None:
    config, base = model.config, model.transformer
    plain = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh") or not plain:
        return None
    return Weights(
        embedding=base.wte.weight.detach(),
        position_embedding=base.wpe.weight.detach(),
        cosines=None,
        sines=None,
        layers=tuple(
            Layer(
                norm1=_norm(layer.ln_1),
                qkv=_transposed(layer.attn.c_attn),
                query_norm=None,
                key_norm=None,
                output=_transposed(layer.attn.c_proj),
                norm2=_norm(layer.ln_2),
                up=_transposed(layer.mlp.c_fc),
                down=_transposed(layer.mlp.c_proj),
            )
            for layer in base.h
        ),
        norm=_norm(base.ln_f),
        head=_linear(model.lm_head),
        num_heads=config.n_head,
        num_kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        epsilon=config.layer_norm_epsilon,
        gated=False,
    )


def _norm(module: Any) -> Norm:
    bias = getattr(module, "bias", None)
    return Norm(module.weight.detach(), None if bias is None else bias.detach())


def _linear(module: Any) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _transposed(module: Any) -> Linear:
    """GPT-2's Conv1D, whose weight is [num_inputs, num_outputs]."""
    return Linear(module.weight.detach().t().contiguous(), module.bias.detach())


def _fused(*modules: Any) -> Linear:
    weight = torch.cat([module.weight for module in modules])
    biases = [module.bias for module in modules]
    if all(bias is None for bias in biases):
        return Linear(weight)
    zeros = [weight.new_zeros(module.weight.shape[0]) for module in modules]
    parts = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
    return Linear(weight, torch.cat(parts))
