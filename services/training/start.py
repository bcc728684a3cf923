"""Where the training of a draft begins: its shape and first weights, taken from the target where they fit."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.causal_lm.weights import Weights, read_weights
from services.draft.artifact import FEATURE, DraftShape, borrowed_digest
from services.draft.decoder import DraftDecoder

INITIAL_SCALE = 0.02
"""Standard deviation of a new matrix."""

INITIAL_SURENESS = 0.3
"""What is left of the final norm of a target."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """What is needed of a target.

    Attributes:
        embedding: Its token embedding, in float32. [vocab, hidden]
        head: Its head, in float32. [vocab, hidden]
        weights: Its layers, if they are of the Llama kind; else None.
        max_length: Longest context.
        epsilon: Of its norms.
        rope_theta: Base of its rotary positions.
    """

    embedding: Tensor
    head: Tensor
    weights: Weights | None
    max_length: int
    epsilon: float
    rope_theta: float


def read_teacher(folder: Path) -> Teacher:
    """Loads a target.

    Raises:
        OSError: It is not there.
        ValueError: It cannot be loaded.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config.get_text_config()
    max_length = config.max_position_embeddings
    weights = read_weights(model, max_length)
    rope = getattr(config, "rope_parameters", None) or {}
    return Teacher(
        embedding=model.get_input_embeddings().weight.detach(),
        head=model.get_output_embeddings().weight.detach(),
        weights=weights if weights is not None and weights.gated else None,
        max_length=max_length,
        epsilon=getattr(config, "rms_norm_eps", 1e-5),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
    )


def shape_of(
    kind: str, num_layers: int, hidden_size: int, teacher: Teacher, vocabulary_size: int, tokenizer_hash: str
) -> DraftShape:
    """The shape of a draft: as wide as the target if it is conditioned on it, else as asked.

    Args:
        kind: See `artifact`.
        num_layers: Decoder layers.
        hidden_size: Width of a "causal_lm".
        teacher: The target.
        vocabulary_size: Of its tokenizer.
        tokenizer_hash: Of its tokenizer.
    """
    width, like = teacher.embedding.shape[1], teacher.weights
    if kind == FEATURE and like is not None:
        heads = like.num_heads, like.num_kv_heads, like.head_dim
        hidden_size, inner = width, like.layers[0].down.weight.shape[1]
    else:
        hidden_size = width if kind == FEATURE else hidden_size
        head_dim = 64 if hidden_size % 64 == 0 else hidden_size // 4 // 2 * 2
        heads = hidden_size // head_dim, hidden_size // head_dim, head_dim
        inner = hidden_size * 8 // 3 // 32 * 32
    return DraftShape(
        kind=kind,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        inner_size=inner,
        rope_theta=teacher.rope_theta,
        epsilon=teacher.epsilon,
        max_length=teacher.max_length,
        vocabulary_size=vocabulary_size,
        tokenizer_hash=tokenizer_hash,
        target_hidden_size=width if kind == FEATURE else 0,
        borrowed_digest=borrowed_digest(teacher.embedding, teacher.head) if kind == FEATURE else "",
    )


def begin(shape: DraftShape, num_kept: int, teacher: Teacher, seed: int) -> DraftDecoder:
    """A draft before its first step.

    Matrices are random and small. The final norm is the target's, made smaller, so that a draft which knows
    nothing yet is not sure of anything. Measured against it, all else equal and after 265,000 tokens: passing
    the target's hidden state on unchanged, or beginning with the target's last layers, agreed less.
    """
    decoder = DraftDecoder(shape, num_kept)
    generator = torch.Generator().manual_seed(seed)
    first: dict[str, Tensor] = {}
    for name, size in shape.tensor_shapes(num_kept):
        if len(size) == 1:
            first[name] = torch.zeros(size) if name == "no_feature" else torch.ones(size)
            continue
        # What a layer adds starts small, so that layers begin close to the identity.
        ends = name.endswith((".output", ".down"))
        scale = INITIAL_SCALE / (2 * shape.num_layers) ** 0.5 if ends else INITIAL_SCALE
        first[name] = torch.randn(size, generator=generator) * scale
    if shape.kind == FEATURE and teacher.weights is not None:
        first["norm"] = teacher.weights.norm.weight.float() * INITIAL_SURENESS
    decoder.set_tensors(first)
    return decoder
