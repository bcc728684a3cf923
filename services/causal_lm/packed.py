"""One forward pass over token trees of several sessions, through an unmodified transformers model.

All rows are concatenated for the linear layers; attention runs for each session over its own rows, so that a
ragged batch needs no padding and no gather. It does not know what the rows are for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from services.causal_lm.rows import Rows

ATTENTION = "stagespec_packed"

NEUTRAL_OPTIONS = frozenset({"dropout", "position_ids", "sliding_window", "use_cache", "output_attentions"})
"""Options of attention that change nothing here: windows are ruled out when a model is loaded."""


@dataclass(frozen=True, slots=True)
class Segment:
    """New rows of one session, to be computed.

    Attributes:
        rows: The session's store; the new rows are its last ones.
        num_new: How many.
        wanted: Which of them need logits, as indices from 0.
    """

    rows: Rows
    num_new: int
    wanted: Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """Results of a pass for one segment.

    Attributes:
        logits: Of the wanted rows, in float32. [num_wanted, vocab]
        hidden_states: Of all new rows, after the final normalisation. [num_new, hidden]
    """

    logits: Tensor
    hidden_states: Tensor


@dataclass(slots=True)
class _Batch:
    """What attention needs to know about a pass, with one entry a segment."""

    rows: list[Rows]
    sizes: list[int]
    masks: list[Tensor | None]  # [num_new, len(rows)]; None: every row is visible
    num_calls: int = 0


@torch.inference_mode()
def forward(model: PreTrainedModel, segments: Sequence[Segment]) -> list[Output]:
    """Computes the new rows of every segment in one pass.

    Args:
        model: A model that `load` prepared.
        segments: At least one, each with at least one new row.

    Returns:
        One output a segment.
    """
    device = model.device
    token_ids, positions, keep, masks, offset = [], [], [], [], 0
    for segment in segments:
        rows, first = segment.rows, len(segment.rows) - segment.num_new
        new = range(first, len(rows))
        token_ids += rows.token_ids[first:]
        positions += [rows.position(row) for row in new]
        keep += [offset + index for index in segment.wanted]
        offset += segment.num_new
        mask = rows.visibility(new)
        masks.append(None if mask.all() else torch.from_numpy(mask).to(device))
    batch = _Batch([segment.rows for segment in segments], [segment.num_new for segment in segments], masks)
    with _LastHiddenState(model) as last:
        result = model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long, device=device),
            packed=batch,
        )
    if batch.num_calls != len(segments) * model.config.get_text_config().num_hidden_layers:
        raise RuntimeError(f"attention ran {batch.num_calls} times for {len(segments)} segments")
    logits = torch.split(result.logits[0].float(), [len(segment.wanted) for segment in segments])
    hidden_states = torch.split(last.hidden_states[0], batch.sizes)
    return [Output(*pair) for pair in zip(logits, hidden_states, strict=True)]


def new_rows(model: PreTrainedModel) -> Rows:
    """An empty store of rows that fits a model."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return Rows(
        num_layers=config.num_hidden_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        device=model.device,
        dtype=model.dtype,
    )


class _LastHiddenState:
    """Catches the base model's last hidden state on its way to the head."""

    hidden_states: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: nn.Module = model.base_model

    def __enter__(self) -> "_LastHiddenState":
        self._hook = self._base.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _keep(self, module: nn.Module, arguments: object, output: Any) -> None:
        self.hidden_states = output.last_hidden_state


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, total, head_dim]
    key: Tensor,  # [1, num_kv_heads, total, head_dim]
    value: Tensor,  # [1, num_kv_heads, total, value_dim]
    attention_mask: None,
    scaling: float | None = None,
    *,
    packed: _Batch,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of each segment over its session's rows, new ones included."""
    unknown = sorted(
        name for name, value in options.items() if value is not None and name not in NEUTRAL_OPTIONS
    )
    if unknown:
        raise RuntimeError(f"its attention has options that packed attention lacks: {unknown}")
    layer = cast(int, module.layer_idx)
    outputs, begin = [], 0
    for rows, size, mask in zip(packed.rows, packed.sizes, packed.masks, strict=True):
        packed.num_calls += 1
        end = begin + size
        length = len(rows)
        keys, values = rows.keys[layer], rows.values[layer]  # [num_kv_heads, capacity, head_dim]
        keys[:, length - size : length] = key[0, :, begin:end]
        values[:, length - size : length] = value[0, :, begin:end]
        outputs.append(_grouped(query[0, :, begin:end], keys[:, :length], values[:, :length], mask, scaling))
        begin = end
    return torch.cat(outputs).unsqueeze(0), None


def _grouped(
    query: Tensor,  # [num_heads, size, head_dim]
    keys: Tensor,  # [num_kv_heads, length, head_dim]
    values: Tensor,  # [num_kv_heads, length, value_dim]
    mask: Tensor | None,  # [size, length]
    scaling: float | None,
) -> Tensor:
    """Attention with the heads that share keys as extra queries, so that keys are not repeated.

    Returns:
        [size, num_heads, value_dim]
    """
    num_heads, size, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    groups = num_heads // num_kv_heads
    grouped = query.reshape(1, num_kv_heads, groups * size, head_dim)
    attended = scaled_dot_product_attention(
        grouped,
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=None if mask is None else mask.repeat(groups, 1),
        scale=scaling,
    )
    return attended.reshape(num_heads, size, -1).transpose(0, 1)


def _no_mask(*_: object, **__: object) -> None:
    """Masks are made for each segment; the model need not make one."""


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _no_mask)
