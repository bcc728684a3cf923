"""What a target wrote, on disk: parts of many sequences each, written whole or not at all.

A collection belongs to one target and one set of settings. It grows until all its parts are there, so a run
that was cut short goes on with the parts that are missing.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.causal_lm.sample import Continuation

SETTINGS = "collection.json"


class CollectionError(ValueError):
    """A folder is no collection, is damaged, or belongs to other settings; the text says what."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences one after the other.

    Attributes:
        token_ids: Of all sequences. [total]
        lengths: Tokens of each. [n]
        prompt_lengths: How many of them were given. [n]
        hidden_states: The target's, of all tokens; the last of each sequence, which never ran, is 0.
            [total, hidden] in float16
        top_ids: The target's likeliest next tokens after each token that has one drawn. [drawn, kept]
        top_logits: Their raw logits. [drawn, kept] in float16
        totals: Logarithm of the sum of exponentials over the whole vocabulary. [drawn]
    """

    token_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    hidden_states: Tensor
    top_ids: Tensor
    top_logits: Tensor
    totals: Tensor


class Collection:
    """A folder of parts.

    Args:
        folder: Where it is; made if need be.
        settings: Everything that its content depends on, as plain data.

    Raises:
        CollectionError: It was begun with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS
        wanted = json.loads(json.dumps(settings))
        if not path.exists():
            _replace(path, json.dumps(wanted, indent=2) + "\n")
            return
        found = read_settings(folder)
        if found != wanted:
            names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise CollectionError(
                f"{folder} was begun with other settings ({', '.join(names)}); name another folder"
            )

    def has(self, part: int) -> bool:
        """Whether a part is complete."""
        return self._path(part).exists()

    def write(self, part: int, continuations: Sequence[Continuation]) -> None:
        """Keeps the sequences of one part, in order of their keys."""
        ordered = sorted(continuations, key=lambda each: each.key)
        hidden = [torch.nn.functional.pad(each.hidden_states, (0, 0, 0, 1)) for each in ordered]
        tensors = {
            "token_ids": torch.tensor([t for each in ordered for t in each.token_ids], dtype=torch.int32),
            "lengths": torch.tensor([len(each.token_ids) for each in ordered], dtype=torch.int32),
            "prompt_lengths": torch.tensor([each.prompt_length for each in ordered], dtype=torch.int32),
            "hidden_states": torch.cat(hidden).half(),
            "top_ids": torch.cat([each.top_ids for each in ordered]).int(),
            "top_logits": torch.cat([each.top_logits for each in ordered]).half(),
            "totals": torch.cat([each.totals for each in ordered]).float(),
        }
        path = self._path(part)
        aside = path.with_suffix(".tmp")
        save_file(tensors, aside)
        os.replace(aside, path)

    def _path(self, part: int) -> Path:
        return self._folder / f"part-{part:05d}.safetensors"


def read_settings(folder: Path) -> dict[str, Any]:
    """What a collection was made with.

    Raises:
        CollectionError: The folder holds none.
    """
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CollectionError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise CollectionError(f"{path} holds no object")
    return settings


def read_parts(folder: Path) -> Iterator[Sequences]:
    """The parts of a collection, in order.

    Raises:
        CollectionError: There are none, or one is damaged.
    """
    paths = sorted(folder.glob("part-*.safetensors"))
    if not paths:
        raise CollectionError(f"{folder} has no parts yet: run `stagespec train-draft collect`")
    for path in paths:
        try:
            tensors = load_file(path)
            part = Sequences(**{name: tensors[name] for name in Sequences.__dataclass_fields__})
        except (OSError, KeyError, SafetensorError) as error:
            raise CollectionError(f"{path} is damaged ({error}); remove it and collect again") from error
        if int(part.lengths.sum()) != len(part.token_ids) or len(part.hidden_states) != len(part.token_ids):
            raise CollectionError(f"{path} is damaged; remove it and collect again")
        yield part


def _replace(path: Path, text: str) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
