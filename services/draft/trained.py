"""Loads a trained draft for serving, or says by name why it cannot be served.

Its layers run on the same lean passes as any Llama model's; what is its own is what the first layer reads and
which tokens the head knows.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.causal_lm.check import UnservableModelError
from services.causal_lm.formats import bytes_per_weight
from services.causal_lm.load import LoadedModel, describe, lean_makers, vocabulary_of
from services.causal_lm.weights import Layer, Linear, Norm, Weights
from services.draft.artifact import FEATURE, ArtifactError, DraftArtifact, borrowed_digest, read_artifact
from services.draft.borrowed import Borrowed, read_borrowed
from services.draft.decoder import rotary
from services.draft.model import DraftModel, Inputs
from services.draft.settings import DraftSettings
from stagespec.v1.observation_pb2 import ELEMENT_TYPE_FLOAT16
from stagespec.v1.stage_pb2 import StageInfo
from stagespec.vocabulary import Vocabulary


@torch.inference_mode()
def load_trained(settings: DraftSettings) -> DraftModel:
    """Loads a folder that `stagespec train-draft fit` made.

    Raises:
        UnservableModelError: It is damaged, or was made for another target, tokenizer or length.
    """
    try:
        artifact = read_artifact(Path(settings.model))
    except ArtifactError as error:
        raise UnservableModelError(str(error)) from error
    shape = artifact.shape
    max_length = settings.max_context_length or shape.max_length
    if max_length > shape.max_length:
        text = f"max_context_length is {max_length} and draft {settings.model!r} ends at {shape.max_length}"
        raise UnservableModelError(text)
    vocabulary, borrowed = _borrow(settings, artifact) if shape.kind == FEATURE else (None, None)
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    weights = _weights(artifact, borrowed, settings, max_length)
    makers = lean_makers(weights, settings, num_threads)
    kernel, make = next(makers, (None, None))
    if kernel is None or make is None:
        text = f"kernel {settings.kernel!r} cannot run draft {settings.model!r}; set kernel to auto"
        raise UnservableModelError(text)
    run = make()
    if kernel == "native":
        torch.set_num_threads(1)  # as for any model: torch's threads would spin beside the kernel's
    info = describe(settings, kernel, run.new_rows(), num_threads)
    info.tokenizer_hash, info.vocabulary_size = shape.tokenizer_hash, shape.vocabulary_size
    info.max_context_length = max_length
    _count(info, artifact, weights, borrowed)
    if borrowed is not None:
        info.observations.hidden_states = ELEMENT_TYPE_FLOAT16
        inputs = _conditioned(artifact, borrowed.embedding.to(settings.device), settings)
    else:
        inputs = _embedded(artifact, settings)
    loaded = LoadedModel(run, kernel, shape.hidden_size, vocabulary, info)
    return DraftModel(loaded, artifact.token_ids.numpy(), inputs, shape.target_hidden_size)


def _borrow(settings: DraftSettings, artifact: DraftArtifact) -> tuple[Vocabulary | None, Borrowed]:
    """What a draft takes from its target, if that is the one it was trained for."""
    shape, target = artifact.shape, settings.target
    if target is None:
        text = f"draft {settings.model!r} borrows its embedding from its target: name that in `target`"
        raise UnservableModelError(text)
    borrowed = read_borrowed(target)
    if borrowed.embedding.shape[1] != shape.target_hidden_size:
        raise UnservableModelError(
            f"draft {settings.model!r} was trained for a target of width {shape.target_hidden_size} and "
            f"{target!r} has {borrowed.embedding.shape[1]}; train one with `stagespec train-draft`"
        )
    vocabulary = vocabulary_of(target)
    found = "" if vocabulary is None else vocabulary.hash
    if found != shape.tokenizer_hash:
        raise UnservableModelError(
            f"draft {settings.model!r} was trained with another tokenizer than that of {target!r}: "
            f"{shape.tokenizer_hash[:12]}... and {found[:12]}..."
        )
    digest = borrowed_digest(borrowed.embedding, borrowed.head)
    if digest != shape.borrowed_digest:
        raise UnservableModelError(
            f"draft {settings.model!r} was trained for another target than {target!r}: embedding and head "
            f"have the digest {digest[:12]}... and not {shape.borrowed_digest[:12]}..."
        )
    # As every weight format has them; half the memory.
    return vocabulary, Borrowed(borrowed.embedding.half(), borrowed.head[artifact.token_ids].float())


def _weights(
    artifact: DraftArtifact, borrowed: Borrowed | None, settings: DraftSettings, max_length: int
) -> Weights:
    """The layers and the head, on the device and in the dtype to compute in."""
    shape, dtype = artifact.shape, getattr(torch, settings.dtype)

    def tensor(values: Tensor) -> Tensor:
        return values.to(settings.device, dtype).contiguous()

    def layer(index: int) -> Layer:
        own = {
            name: tensor(artifact.tensors[f"layers.{index}.{name}"])
            for name in ("norm1", "qkv", "output", "norm2", "up", "down")
        }
        return Layer(
            norm1=Norm(own["norm1"]),
            qkv=Linear(own["qkv"]),
            query_norm=None,
            key_norm=None,
            output=Linear(own["output"]),
            norm2=Norm(own["norm2"]),
            up=Linear(own["up"]),
            down=Linear(own["down"]),
        )

    cosines, sines = rotary(shape, torch.arange(max_length))
    head = artifact.tensors["embedding"][:-1] if borrowed is None else borrowed.head
    return Weights(
        embedding=torch.empty(1, shape.hidden_size, device=settings.device, dtype=dtype),  # inputs are given
        position_embedding=None,
        cosines=cosines.to(settings.device),
        sines=sines.to(settings.device),
        layers=tuple(layer(index) for index in range(shape.num_layers)),
        norm=Norm(tensor(artifact.tensors["norm"])),
        head=Linear(tensor(head)),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        epsilon=shape.epsilon,
        gated=True,
    )


def _conditioned(artifact: DraftArtifact, embedding: Tensor, settings: DraftSettings) -> Inputs:
    """See `DraftDecoder.inputs`."""
    shape, device = artifact.shape, settings.device
    names = ("join", "embedding_norm", "feature_norm", "no_feature")
    join, embedding_norm, feature_norm, no_feature = (artifact.tensors[n].to(device) for n in names)

    @torch.inference_mode()
    def inputs(token_ids: Sequence[int], features: Tensor, known: Tensor) -> Tensor:
        tokens = embedding[torch.tensor(token_ids, device=device)].float()
        tokens = functional.rms_norm(tokens, embedding_norm.shape, embedding_norm, shape.epsilon)
        given = features.to(device).float()
        given = functional.rms_norm(given, feature_norm.shape, feature_norm, shape.epsilon)
        given = torch.where(known.to(device).unsqueeze(1), given, no_feature)
        return functional.linear(torch.cat([tokens, given], dim=1), join)

    return inputs


def _embedded(artifact: DraftArtifact, settings: DraftSettings) -> Inputs:
    """See `DraftDecoder.embedded`."""
    table = artifact.tensors["embedding"].to(settings.device)
    kept = artifact.token_ids.numpy()

    @torch.inference_mode()
    def inputs(token_ids: Sequence[int], features: Tensor, known: Tensor) -> Tensor:
        places = np.searchsorted(kept, token_ids)
        places[kept[np.minimum(places, len(kept) - 1)] != token_ids] = len(kept)
        return table[torch.from_numpy(places).to(settings.device)]

    return inputs


def _count(info: StageInfo, artifact: DraftArtifact, weights: Weights, borrowed: Borrowed | None) -> None:
    """Fills in parameters and bytes: as they lie in memory, and as one pass reads them."""
    packed = sum(
        linear.weight.numel()
        for layer in weights.layers
        for linear in (layer.qkv, layer.output, layer.up, layer.down)
    )
    head = weights.head.weight.numel()
    own = sum(tensor.numel() for tensor in artifact.tensors.values())
    info.num_parameters = own + (0 if borrowed is None else head)
    # What makes the inputs, and the norms, stay in float32; of an embedding single rows are looked up.
    table = artifact.tensors["embedding"].numel() if borrowed is None else 0
    plain = 4 * (own - packed - table)
    read = round((packed + head) * bytes_per_weight(info.weight_format)) + plain
    info.pass_weight_bytes = read
    info.weight_bytes = read + (4 * table if borrowed is None else 2 * borrowed.embedding.numel())
