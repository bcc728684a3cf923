"""Whether a model and its caches fit into memory: said before the weights are read, with the figures.

It knows files and settings; how much memory there is, is found in memory.py.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from services.causal_lm.check import UnservableModelError
from services.causal_lm.memory import Memory, gibibytes, memory_of
from services.causal_lm.rows import BLOCK
from services.causal_lm.settings import MIN_CONTEXT_LENGTH, ModelSettings

SHARE = 4
"""Unless settings say more, caches take one in so many of the bytes that are available."""

_UNKNOWN_MEMORY = 8 * 1024**3


def require_room(settings: ModelSettings) -> None:
    """Refuses a model whose weights do not fit into memory with the smallest cache beside them.

    A model whose files cannot be found or read passes: loading it says better what is wrong.

    Args:
        settings: What is about to be loaded, and how.

    Raises:
        UnservableModelError: It does not fit; the text has both figures.
    """
    memory = memory_of(settings.device)
    if memory is None:
        return
    size = getattr(torch, settings.dtype).itemsize
    try:
        config = AutoConfig.from_pretrained(settings.model).get_text_config()
        weights = _num_values(settings.model) * size
        rows = least_rows(settings, settings.max_context_length or config.max_position_embeddings)
    except (OSError, ValueError, AttributeError, KeyError):
        return
    cache = rows * _row_values(config) * size
    if weights + cache > memory.available:
        raise UnservableModelError(
            f"model {settings.model!r} takes {gibibytes(weights)} for its weights as {settings.dtype} and "
            f"{gibibytes(cache)} for the smallest cache, and {settings.device} has "
            f"{gibibytes(memory.available)} available; take a smaller model or dtype, or free memory"
        )


def least_rows(settings: ModelSettings, max_context_length: int, block: int = BLOCK) -> int:
    """Rows of the smallest useful cache: a short context with the largest draft, and a block a session."""
    longest = min(MIN_CONTEXT_LENGTH + settings.max_nodes, max_context_length)
    return (settings.max_sessions + -(-longest // block)) * block


def cache_limit(
    settings: ModelSettings, row_bytes: int, max_context_length: int, block: int, memory: Memory | None
) -> int:
    """Bytes that the caches of all sessions may take together.

    Args:
        settings: The stage's settings.
        row_bytes: Bytes of one token.
        max_context_length: Longest context.
        block: Tokens by which a cache grows.
        memory: Of the device, with the model loaded; None if it is not known.

    Raises:
        UnservableModelError: The setting is out of range, or there is no memory for the smallest cache.
    """
    least = least_rows(settings, max_context_length, block) * row_bytes
    asked = settings.max_cache_bytes
    if asked is not None:
        if asked < least:
            raise UnservableModelError(
                f"max_cache_bytes is {asked} and must be at least {least}, which max_sessions "
                f"({settings.max_sessions}) and max_nodes ({settings.max_nodes}) take at {row_bytes} bytes a "
                f"token in blocks of {block}; raise it, or lower them"
            )
        if memory is not None and asked > memory.total:
            raise UnservableModelError(
                f"max_cache_bytes is {asked} and {settings.device} has {memory.total} bytes in all"
            )
        return asked
    if memory is not None and least > memory.available:
        raise UnservableModelError(
            f"the smallest cache takes {gibibytes(least)} and {settings.device} has "
            f"{gibibytes(memory.available)} available; lower max_sessions or max_nodes, or free memory"
        )
    most = settings.max_sessions * -(-max_context_length // block) * block * row_bytes
    available = _UNKNOWN_MEMORY if memory is None else memory.available
    return max(least, min(most, available // SHARE))


def _row_values(config: Any) -> int:
    """Numbers in the keys and values of one token."""
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    num_layers: int = config.num_hidden_layers
    return num_layers * (getattr(config, "num_key_value_heads", None) or heads) * 2 * width


def _num_values(model: str) -> int:
    """Numbers in a model's weights, found without reading them."""
    for name, count in (("model.safetensors", _num_safe), ("pytorch_model.bin", _num_bin)):
        index = _find(model, f"{name}.index.json")
        names = [name]
        if index is not None:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [path for path in (_find(model, each) for each in names) if path is not None]
        if paths:
            return sum(count(path) for path in paths)
    return 0


def _num_safe(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _num_bin(path: Path) -> int:
    config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    stored: torch.dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    return path.stat().st_size // stored.itemsize


def _find(model: str, name: str) -> Path | None:
    path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)
