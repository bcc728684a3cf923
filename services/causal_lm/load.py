"""Loads a causal language model for serving, or says by name why it cannot be served."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from services.causal_lm.check import UnservableModelError, compare, reference
from services.causal_lm.fit import require_room
from services.causal_lm.formats import as_served, bytes_per_weight
from services.causal_lm.forward import Forward, Output, Segment
from services.causal_lm.lean import LeanForward
from services.causal_lm.linears import serve_linears
from services.causal_lm.native.forward import NativeForward
from services.causal_lm.native.library import native_library
from services.causal_lm.packed import PackedForward
from services.causal_lm.rows import Rows
from services.causal_lm.settings import ModelSettings
from services.causal_lm.weights import Weights, read_weights
from stagespec.v1 import stage_pb2
from stagespec.vocabulary import Vocabulary, read_vocabulary

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the load check.

    Attributes:
        run: Its forward pass.
        kernel: Which one that is: "native", "torch" or "generic".
        hidden_size: Width of its hidden states.
        vocabulary: The tokenizer's, without padding ids; None for a model without tokenizer.
        info: What there is to say about any stage that runs it.
    """

    run: Forward
    kernel: str
    hidden_size: int
    vocabulary: Vocabulary | None
    info: stage_pb2.StageInfo

    def new_rows(self) -> Rows:
        """An empty store of rows for one session."""
        return self.run.new_rows()

    def forward(self, segments: Sequence[Segment]) -> list[Output]:
        """Computes the new rows of every segment in one pass, and waits for it; one output a segment."""
        outputs = self.run(segments)
        if self.info.device.startswith("cuda"):
            torch.cuda.synchronize(self.info.device)  # else its time would be booked under what follows
        return outputs


def load(settings: ModelSettings) -> LoadedModel:
    """Loads, checks and prepares a model.

    Args:
        settings: What to load and how.

    Raises:
        UnservableModelError: The model is missing, too large, or cannot be decoded exactly with token trees.
    """
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    require_room(settings)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="eager"
        )
    except (OSError, ValueError) as error:
        raise UnservableModelError(f"model {settings.model!r} cannot be loaded: {error}") from error
    try:
        model = model.eval().to(settings.device)
    except (AssertionError, RuntimeError) as error:  # torch was built without it, or it is full or not there
        raise UnservableModelError(f"device {settings.device!r} cannot be used: {error}") from error
    config = model.config.get_text_config()
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    num_parameters = sum(parameter.numel() for parameter in parameters)
    num_pass_weights = num_parameters - _num_looked_up(model)
    max_context_length = _max_context_length(config, settings)
    vocabulary = vocabulary_of(settings.model)
    num_logits = config.vocab_size
    size = num_logits if vocabulary is None else min(len(vocabulary.tokens), num_logits)
    eos_token_ids = _eos_token_ids(model)

    kernel, run = _checked_forward(model, settings, size, max_context_length, num_threads)
    if kernel == "native":
        # Its threads are its own; torch's would spin beside them after every operation they shared.
        torch.set_num_threads(1)
    if settings.device.startswith("cuda"):
        torch.cuda.empty_cache()  # what fusing and checking left, so that caches find it free
    bytes_each = bytes_per_weight(settings.weight_format or settings.dtype)
    info = describe(settings, kernel, run.new_rows(), num_threads)
    info.tokenizer_hash = "" if vocabulary is None else vocabulary.hash
    info.vocabulary_size = size
    info.max_context_length = max_context_length
    info.num_parameters = num_parameters
    info.weight_bytes = round(num_parameters * bytes_each)
    info.pass_weight_bytes = round(num_pass_weights * bytes_each)
    info.eos_token_ids.extend(eos_token_ids)
    return LoadedModel(run, kernel, config.hidden_size, vocabulary, info)


def describe(settings: ModelSettings, kernel: str, rows: Rows, num_threads: int) -> stage_pb2.StageInfo:
    """What there is to say about a stage from how its model is run, whatever the model is."""
    layers, heads = rows.values.shape[:2]
    width = (rows.keys.shape[3] + rows.values.shape[3]) * rows.keys.element_size()
    return stage_pb2.StageInfo(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        weight_format=settings.weight_format or settings.dtype,
        kernel=kernel,
        max_nodes=settings.max_nodes,
        can_rollback=True,
        cache_bytes_per_token=layers * heads * width,
        num_threads=num_threads,
    )


def _checked_forward(
    model: PreTrainedModel, settings: ModelSettings, vocabulary_size: int, max_length: int, num_threads: int
) -> tuple[str, Forward]:
    """The fastest forward pass that the settings admit and the load check accepts.

    Raises:
        UnservableModelError: There is none.
    """
    weight_format = settings.weight_format or settings.dtype
    asked = settings.kernel
    weights = None if asked == "generic" else read_weights(model, max_length)
    as_served(model, weight_format)
    expected = reference(model, vocabulary_size)
    makers = list(_makers(model, weights, settings, num_threads))
    if not makers:
        text = f"kernel {asked!r} cannot run model {settings.model!r}; set kernel to auto"
        raise UnservableModelError(text)
    for place, (kernel, make) in enumerate(makers):
        try:
            run = make()
            compare(run, settings, vocabulary_size, expected)
        except UnservableModelError as error:
            if place == len(makers) - 1:
                raise
            _log.warning("the %s kernel does not serve this model (%s); trying the next", kernel, error)
        else:
            return kernel, run
    raise AssertionError("the last one returns or raises")


def _makers(
    model: PreTrainedModel, weights: Weights | None, settings: ModelSettings, num_threads: int
) -> Iterator[tuple[str, Callable[[], Forward]]]:
    """What may run the model, the fastest first."""
    if weights is not None:
        yield from lean_makers(weights, settings, num_threads)
    if settings.kernel in ("auto", "generic"):
        yield "generic", partial(_generic, model, settings.weight_format or settings.dtype)


def lean_makers(
    weights: Weights, settings: ModelSettings, num_threads: int
) -> Iterator[tuple[str, Callable[[], Forward]]]:
    """What may run weights of a family that the lean passes know, by its name, the fastest first."""
    asked = settings.kernel
    weight_format = settings.weight_format or settings.dtype
    on_cpu = settings.device == "cpu" and settings.dtype == "float32"
    if on_cpu and asked in ("auto", "native"):
        library = native_library()
        if library is not None:
            yield "native", partial(NativeForward, library, weights, weight_format, num_threads)
    if asked in ("auto", "torch"):
        yield "torch", partial(LeanForward, weights, weight_format)


def _generic(model: PreTrainedModel, weight_format: str) -> Forward:
    try:
        run = PackedForward(model)
    except ValueError as error:
        raise UnservableModelError(f"it has an attention that token trees cannot use: {error}") from error
    serve_linears(model, weight_format)
    return run


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


def vocabulary_of(model: str) -> Vocabulary | None:
    """The vocabulary of a model's tokenizer; None for a model without one."""
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


def _num_looked_up(model: PreTrainedModel) -> int:
    """Parameters of which a pass reads single rows only: embeddings that are not the head's weight too."""
    head: Any = model.get_output_embeddings()
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return sum(table.numel() for table in tables if head is None or table is not head.weight)
