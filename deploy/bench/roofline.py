"""The shortest time in which a pass could be computed here, whoever computes it.

It knows bytes and operations, not kernels.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from stagespec.v1.stage_pb2 import StageInfo


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine can do with the threads that are used.

    Attributes:
        read_bytes_per_s: Most bytes read from memory in a second.
        flops: Most float32 operations in a second; a multiplication and an addition are two.
    """

    read_bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass of a model has to move and to compute.

    Attributes:
        weight_bytes: Weights that every pass reads, as they are stored.
        num_weights: Weights that every row is multiplied by.
        cache_bytes_per_token: Keys and values of one context token.
        attention_flops: Operations of a row for each context token that it attends to.
    """

    weight_bytes: float
    num_weights: float
    cache_bytes_per_token: float = 0.0
    attention_flops: float = 0.0


def minimal_seconds(
    work: Work, machine: Machine, *, num_rows: int, context: float, num_sessions: int = 1
) -> float:
    """The longer of reading everything once and computing everything, at the machine's full speed.

    Args:
        work: The model's.
        machine: The limits.
        num_rows: Rows in the pass, all sessions together.
        context: Tokens that each row attends to.
        num_sessions: Contexts whose caches are read.
    """
    num_bytes = work.weight_bytes + num_sessions * context * work.cache_bytes_per_token
    operations = num_rows * (2 * work.num_weights + context * work.attention_flops)
    return max(num_bytes / machine.read_bytes_per_s, operations / machine.flops)


def attention_flops(model: str) -> float:
    """Operations of one row for each context token: a dot product and a weighted sum in every head.

    Args:
        model: Folder of the model; 0 if its configuration is not there to be read.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        num_layers = config.get("num_hidden_layers") or config["n_layer"]
        num_heads = config.get("num_attention_heads") or config["n_head"]
        hidden_size = config.get("hidden_size") or config["n_embd"]
        head_dim = config.get("head_dim") or hidden_size // num_heads
        return float(4 * num_layers * num_heads * head_dim)
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def target_work(info: StageInfo) -> Work | None:
    """What a pass of the target has to do, by what it says of itself; None if it does not say."""
    if not info.weight_bytes or not info.pass_weight_bytes:
        return None
    share = info.pass_weight_bytes / info.weight_bytes
    operations = attention_flops(info.model)
    return Work(info.pass_weight_bytes, info.num_parameters * share, info.cache_bytes_per_token, operations)
