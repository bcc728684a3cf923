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

from services.causal_lm.forward import Output, Segment
from services.causal_lm.rows import Rows

ATTENTION = "stagespec_packed"

NEUTRAL_OPTIONS = frozenset({"dropout", "position_ids", "sliding_window", "use_cache", "output_attentions"})
"""Options of attention that change nothing here: windows are ruled out when a model is loaded."""


@dataclass(slots=True)
class Layout:
    """How the new rows of several segments lie side by side in a pass.

    Attributes:
        token_ids: [n]
        positions: [n]
        wanted: Rows that need logits. [num_wanted]
        rows: The store of each segment.
        parts: Which rows of the pass are each segment's.
        masks: What each segment's rows see: [num_new, len(rows)], or None for everything.
        num_calls: Attentions computed, for a check.
    """

    token_ids: Tensor
    positions: Tensor
    wanted: Tensor
    rows: list[Rows]
    parts: list[slice]
    masks: list[Tensor | None]
    num_calls: int = 0


def lay_out(segments: Sequence[Segment], device: torch.device) -> Layout:
    """Puts segments side by side."""
    token_ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    parts: list[slice] = []
    masks: list[Tensor | None] = []
    for segment in segments:
        rows, first, offset = segment.rows, len(segment.rows) - segment.num_new, len(token_ids)
        new = range(first, len(rows))
        token_ids += rows.token_ids[first:]
        positions += [rows.position(row) for row in new]
        wanted += [offset + index for index in segment.wanted]
        parts.append(slice(offset, offset + segment.num_new))
        mask = rows.visibility(new)
        masks.append(None if mask.all() else torch.from_numpy(mask).to(device))
    return Layout(
        torch.tensor(token_ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(wanted, dtype=torch.long, device=device),
        [segment.rows for segment in segments],
        parts,
        masks,
    )


class PackedForward:
    """A transformers model whose attention was set to `ATTENTION`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wraps a model.

        Raises:
            ValueError: Its attention cannot be replaced.
        """
        model.set_attn_implementation(ATTENTION)
        self._model = model

    def new_rows(self) -> Rows:
        """See `services.causal_lm.forward.Forward`."""
        config = self._model.config.get_text_config()
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return Rows(
            num_layers=config.num_hidden_layers,
            num_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            device=self._model.device,
            dtype=self._model.dtype,
        )

    @torch.inference_mode()
    def __call__(self, segments: Sequence[Segment]) -> list[Output]:
        """See `services.causal_lm.forward.Forward`."""
        layout = lay_out(segments, self._model.device)
        with _LastHiddenState(self._model) as last:
            result = self._model(
                input_ids=layout.token_ids.unsqueeze(0),
                position_ids=layout.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=layout.wanted,
                packed=layout,
            )
        if layout.num_calls != len(segments) * self._model.config.get_text_config().num_hidden_layers:
            raise RuntimeError(f"attention ran {layout.num_calls} times for {len(segments)} segments")
        logits = torch.split(result.logits[0].float(), [len(segment.wanted) for segment in segments])
        hidden_states = torch.split(last.hidden_states[0], [segment.num_new for segment in segments])
        return [Output(*pair) for pair in zip(logits, hidden_states, strict=True)]


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
    query: Tensor,  # [1, num_heads, n, head_dim]
    key: Tensor,  # [1, num_kv_heads, n, head_dim]
    value: Tensor,  # [1, num_kv_heads, n, value_dim]
    attention_mask: None,
    scaling: float | None = None,
    *,
    packed: Layout,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of each segment over its session's rows, new ones included."""
    unknown = sorted(
        name for name, value in options.items() if value is not None and name not in NEUTRAL_OPTIONS
    )
    if unknown:
        raise RuntimeError(f"its attention has options that packed attention lacks: {unknown}")
    layer = cast(int, module.layer_idx)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [n, heads, head_dim]
    outputs = []
    for rows, mask, part in zip(packed.rows, packed.masks, packed.parts, strict=True):
        packed.num_calls += 1
        outputs.append(attend_grouped(rows, layer, mask, query[part], key[part], value[part], scaling))
    return torch.cat(outputs).unsqueeze(0), None


def attend_grouped(
    rows: Rows,
    layer: int,
    mask: Tensor | None,  # [num_new, len(rows)]
    query: Tensor,  # [num_new, num_heads, head_dim]
    key: Tensor,  # [num_new, num_kv_heads, head_dim]
    value: Tensor,  # [num_new, num_kv_heads, value_dim]
    scaling: float | None = None,
) -> Tensor:
    """Stores the new keys and values of a session and attends over all of them.

    Heads that share keys count as extra queries, so that keys are not repeated.

    Returns:
        [num_new, num_heads, value_dim]
    """
    num_new, num_heads, head_dim = query.shape
    num_kv_heads, length = key.shape[1], len(rows)
    groups = num_heads // num_kv_heads
    keys, values = rows.keys[layer, ..., 0], rows.values[layer]  # [num_kv_heads, capacity, head_dim]
    keys[:, length - num_new : length] = key.transpose(0, 1)
    values[:, length - num_new : length] = value.transpose(0, 1)
    grouped = query.transpose(0, 1).reshape(1, num_kv_heads, groups * num_new, head_dim)
    attended = scaled_dot_product_attention(
        grouped,
        keys[:, :length].unsqueeze(0),
        values[:, :length].unsqueeze(0),
        attn_mask=None if mask is None else mask.repeat(groups, 1),
        scale=scaling,
    )
    return attended.reshape(num_heads, num_new, -1).transpose(0, 1)


def _no_mask(*_: object, **__: object) -> None:
    """Masks are made for each segment; the model need not make one."""


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _no_mask)
