"""The tables of a target that a draft borrows, read without loading the rest of it."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.hub import cached_file

from services.causal_lm.check import UnservableModelError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A target's tables.

    Attributes:
        embedding: [vocab, hidden]
        head: The same tensor where the model ties them. [vocab, hidden]
    """

    embedding: Tensor
    head: Tensor


def read_borrowed(target: str) -> Borrowed:
    """Reads embedding and head.

    Args:
        target: Folder of a Hugging Face causal language model, or its id on the hub.

    Raises:
        UnservableModelError: It is not there, or not stored as safetensors.
    """
    try:
        config = AutoConfig.from_pretrained(target)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        if config.get_text_config().tie_word_embeddings:
            tables[1] = tables[0]
        names = [next(name for name, p in model.named_parameters() if p is table) for table in tables]
        found = {name: _read(target, name, model.base_model_prefix) for name in set(names)}
    except (OSError, ValueError, KeyError, StopIteration, SafetensorError) as error:
        reason = str(error) or "they are not in its safetensors"
        text = f"the embedding and head of target {target!r} cannot be read: {reason}"
        raise UnservableModelError(text) from error
    return Borrowed(*(found[name] for name in names))


def _read(target: str, name: str, prefix: str) -> Tensor:
    """One tensor of a model; some are stored without the name of the base model before theirs."""
    names = (name, name.removeprefix(f"{prefix}."))
    index = cached_file(target, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        stored = next(each for each in names if each in places)
        path = cached_file(target, places[stored])
    else:
        path = cached_file(target, _WHOLE)
    assert path is not None  # otherwise an OSError has said so
    with safe_open(path, framework="pt") as file:
        stored = next(each for each in names if each in file.keys())  # noqa: SIM118 (it is no mapping)
        tensor: Tensor = file.get_tensor(stored)
    return tensor
