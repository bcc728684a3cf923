"""Loads a causal language model for serving, or says by name why it cannot be served."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from services.causal_lm.check import UnservableModelError, compare, reference
from services.causal_lm.packed import ATTENTION, new_rows
from services.causal_lm.prepack import prepack
from services.causal_lm.rows import Rows
from services.causal_lm.settings import ModelSettings
from stagespec.v1 import stage_pb2
from stagespec.vocabulary import Vocabulary, read_vocabulary

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the load check, ready for `packed.forward`.

    Attributes:
        model: The model.
        vocabulary: The tokenizer's, without padding ids; None for a model without tokenizer.
        info: What there is to say about any stage that runs it.
    """

    model: PreTrainedModel
    vocabulary: Vocabulary | None
    info: stage_pb2.StageInfo

    def new_rows(self) -> Rows:
        """An empty store of rows for one session."""
        return new_rows(self.model)


def load(settings: ModelSettings) -> LoadedModel:
    """Loads, checks and prepares a model.

    Args:
        settings: What to load and how.

    Raises:
        UnservableModelError: The model is missing, or cannot be decoded exactly with token trees.
    """
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="eager"
        )
    except (OSError, ValueError) as error:
        raise UnservableModelError(f"model {settings.model!r} cannot be loaded: {error}") from error
    model = model.eval().to(settings.device)
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    max_context_length = _max_context_length(model.config.get_text_config(), settings)
    vocabulary = _vocabulary(settings.model)
    num_logits = model.config.get_text_config().vocab_size
    size = num_logits if vocabulary is None else min(len(vocabulary.tokens), num_logits)

    expected = reference(model, size)
    prepack(model)
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        text = f"model {settings.model!r} has an attention that token trees cannot use: {error}"
        raise UnservableModelError(text) from error
    compare(model, settings.model, size, expected)

    rows = new_rows(model)
    layers, heads = rows.keys.shape[:2]
    width = (rows.keys.shape[3] + rows.values.shape[3]) * rows.keys.element_size()
    info = stage_pb2.StageInfo(
        model=settings.model,
        device=str(model.device),
        dtype=settings.dtype,
        weight_format=settings.dtype,
        tokenizer_hash="" if vocabulary is None else vocabulary.hash,
        vocabulary_size=size,
        max_context_length=max_context_length,
        max_nodes=settings.max_nodes,
        can_rollback=True,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        cache_bytes_per_token=layers * heads * width,
        num_threads=torch.get_num_threads(),
        eos_token_ids=_eos_token_ids(model),
    )
    return LoadedModel(model, vocabulary, info)


def _max_context_length(config: PretrainedConfig, settings: ModelSettings) -> int:
    """The longest context that is exact, checked against what the configuration says of the model.

    Raises:
        UnservableModelError: Caches that cannot be branched, positions that depend on the length, or a limit
            above the model's.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        text = f"model {settings.model!r} has no absolute or rotary positions, which token trees need"
        raise UnservableModelError(text)
    asked = settings.max_context_length
    if asked is not None and asked > limit:
        text = f"max_context_length is {asked} and model {settings.model!r} ends at {limit}"
        raise UnservableModelError(text)
    length = asked or limit
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other:
        raise UnservableModelError(f"model {settings.model!r} has layers that cannot be rolled back: {other}")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not kinds
    if slides and window is not None and window < length:
        text = f"model {settings.model!r} attends through a sliding window, which cannot be rolled back; "
        text += f"set max_context_length to at most {window} (it is {length})"
        raise UnservableModelError(text)
    for name in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if name in LENGTH_DEPENDENT_ROPE:
            text = f"model {settings.model!r} has positions that depend on the context length (rope {name!r})"
            raise UnservableModelError(text)
    return length


def _rope_types(parameters: dict[str, object]) -> Iterable[str]:
    for key, value in parameters.items():
        if key == "rope_type":
            yield str(value)
        elif isinstance(value, dict):
            yield from _rope_types(value)


def _vocabulary(model: str) -> Vocabulary | None:
    path = cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if path is not None:
        return read_vocabulary(Tokenizer.from_file(path))
    # Without this test transformers makes up an empty tokenizer for a model that has none.
    if cached_file(model, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False) is None:
        return None
    return read_vocabulary(AutoTokenizer.from_pretrained(model).backend_tokenizer)


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, list) else [eos]
