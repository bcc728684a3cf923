"""A lean forward pass of a Llama or GPT-2 model from torch's own kernels.

Few operations, fused projections, packed weights, caches that are written in place. It is what runs where the
C kernel cannot, other devices included, and the oracle of that kernel.

A pass is cut at its attentions, which have shapes of their own for each session. The pieces between them have
one shape for a number of rows: on CUDA they are captured as graphs for the sizes of `buckets.SIZES`, and a
pass is filled up to the next size. There a row's last bits depend on that size, since cuBLAS chooses its
kernels by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from services.causal_lm.buckets import SIZES, bucket
from services.causal_lm.forward import Output, Segment, given_inputs
from services.causal_lm.graphs import Capture, Work, capture_for
from services.causal_lm.head import make_head
from services.causal_lm.linears import Multiply, make_linear
from services.causal_lm.packed import Layout, attend_grouped, lay_out
from services.causal_lm.pass_state import PassState, begun_state, fixed_states, run_in_place
from services.causal_lm.rows import Rows
from services.causal_lm.weights import Norm, Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    norm1: Norm
    qkv: Multiply
    query_norm: Norm | None
    key_norm: Norm | None
    output: Multiply
    norm2: Norm
    up: Multiply
    down: Multiply


class LeanForward:
    """A model on torch's kernels."""

    def __init__(self, weights: Weights, weight_format: str, capture: Capture | None = None) -> None:
        """Packs a model.

        Args:
            weights: On the device and in the dtype to compute in.
            weight_format: See `make_linear`.
            capture: Captures the pieces, for passes of fixed sizes. None: CUDA graphs on CUDA; on other
                devices nothing is captured, and a pass has as many rows as it needs.
        """
        half = weight_format != "float32" and weights.embedding.dtype == torch.float32
        self._weights = weights
        self._embedding = weights.embedding.half() if half else weights.embedding
        self._positions = weights.position_embedding
        if half and self._positions is not None:
            self._positions = self._positions.half()
        self._layers = [
            _Layer(
                norm1=layer.norm1,
                qkv=make_linear(layer.qkv, weight_format),
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                output=make_linear(layer.output, weight_format),
                norm2=layer.norm2,
                up=make_linear(layer.up, weight_format),
                down=make_linear(layer.down, weight_format),
            )
            for layer in weights.layers
        ]
        self._head = make_head(weights.head, weight_format)
        self._capture = capture or capture_for(weights.embedding.device)
        self._captured: dict[int, tuple[PassState, list[Work]]] = {}  # by number of rows

    def new_rows(self) -> Rows:
        """See `services.causal_lm.forward.Forward`."""
        weights = self._weights
        return Rows(
            len(weights.layers),
            weights.num_kv_heads,
            weights.head_dim,
            weights.embedding.device,
            weights.embedding.dtype,
        )

    @torch.inference_mode()
    def __call__(self, segments: Sequence[Segment]) -> list[Output]:
        """See `services.causal_lm.forward.Forward`."""
        layout = lay_out(segments, self._embedding.device)
        state, (begin, *rest) = self._prepare(layout, given_inputs(segments))
        begin()
        for index, piece in enumerate(rest):
            self._attend(index, layout, state)
            piece()
        # The next pass may write over the state, so what is handed out is computed beside it.
        hidden = self._norm(state.x[: len(layout.token_ids)], self._weights.norm)
        logits = self._logits(hidden, layout.wanted)
        return [
            Output(*pair)
            for pair in zip(
                torch.split(logits, [len(segment.wanted) for segment in segments]),
                torch.split(hidden, [segment.num_new for segment in segments]),
                strict=True,
            )
        ]

    def _prepare(self, layout: Layout, given: Tensor | None) -> tuple[PassState, list[Work]]:
        """The state of a pass, and its pieces: all but the attentions, which come between them.

        Passes with given inputs are those of small drafts, and run as they are on any device.
        """
        token_ids, positions = layout.token_ids, layout.positions
        pieces = [partial(self._piece, index) for index in range(len(self._layers) + 1)]
        size = None if self._capture is None else bucket(len(token_ids))
        if self._capture is None or size is None or given is not None:
            state = begun_state(self._weights, token_ids, positions)
            state.given = given
            return state, [partial(piece, state) for piece in pieces]
        if not self._captured:
            # All sizes before the first pass, whose state a capture would overwrite. The largest comes first,
            # so that the others find enough memory in the pool.
            self._captured = {
                each: (state, [self._capture(partial(run_in_place, piece, state)) for piece in pieces])
                for each, state in fixed_states(self._weights, SIZES[::-1]).items()
            }
        state, works = self._captured[size]
        state.fill(token_ids, positions)
        return state, works

    def _piece(self, index: int, state: PassState) -> None:
        """From the tokens or the attention before to the attention of layer `index`, or to the end."""
        if index == 0:
            self._embed(state)
        else:
            self._leave(self._layers[index - 1], state)
        if index < len(self._layers):
            self._enter(self._layers[index], state)

    def _embed(self, state: PassState) -> None:
        weights, dtype = self._weights, self._weights.embedding.dtype
        state.x = (self._embedding[state.token_ids] if state.given is None else state.given).to(dtype)
        if self._positions is not None:
            state.x.add_(self._positions[state.positions])
        if weights.cosines is not None and weights.sines is not None:
            state.cosines = weights.cosines[state.positions].unsqueeze(1).to(dtype)
            state.sines = weights.sines[state.positions].unsqueeze(1).to(dtype)

    def _enter(self, layer: _Layer, state: PassState) -> None:
        """From a layer's input to its attention."""
        weights = self._weights
        num_heads, num_kv_heads = weights.num_heads, weights.num_kv_heads
        state.qkv = layer.qkv(self._norm(state.x, layer.norm1)).view(len(state.x), -1, weights.head_dim)
        turned = state.qkv[:, : num_heads + num_kv_heads]  # queries and keys
        if layer.query_norm is not None and layer.key_norm is not None:
            turned[:, :num_heads] = self._norm(turned[:, :num_heads], layer.query_norm)
            turned[:, num_heads:] = self._norm(turned[:, num_heads:], layer.key_norm)
        if state.cosines is not None and state.sines is not None:
            turned.copy_(_rotate(turned, state.cosines, state.sines))

    def _attend(self, index: int, layout: Layout, state: PassState) -> None:
        """A layer's attention: each session's over its own rows, and none for rows that are nobody's."""
        weights = self._weights
        for rows, mask, part in zip(layout.rows, layout.masks, layout.parts, strict=True):
            query, key, value = torch.split(
                state.qkv[part], [weights.num_heads, weights.num_kv_heads, weights.num_kv_heads], dim=1
            )
            state.attended[part] = attend_grouped(rows, index, mask, query, key, value)

    def _leave(self, layer: _Layer, state: PassState) -> None:
        """From a layer's attention to its output."""
        x = state.x
        x.add_(layer.output(state.attended.flatten(1)))
        inner = layer.up(self._norm(x, layer.norm2))
        if self._weights.gated:
            gates, values = inner.chunk(2, dim=1)
            inner = functional.silu(gates) * values
        else:
            inner = functional.gelu(inner, approximate="tanh")
        x.add_(layer.down(inner))

    def _logits(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """Logits of the wanted rows. [num_wanted, vocab]."""
        num_wanted = len(wanted)
        if not num_wanted:
            shape = 0, self._weights.head.weight.shape[0]
            return torch.empty(shape, device=hidden.device, dtype=torch.float32)
        # A single product gains nothing from a graph, which would hold on to memory for all of its logits;
        # its shapes are kept few all the same.
        size = None if self._capture is None else bucket(num_wanted)
        filled = wanted if size is None else functional.pad(wanted, (0, size - num_wanted))
        return self._head(hidden[filled])[:num_wanted]

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        shape, epsilon = (x.shape[-1],), self._weights.epsilon
        if norm.bias is None:
            return functional.rms_norm(x, shape, norm.weight, epsilon)
        return functional.layer_norm(x, shape, norm.weight, norm.bias, epsilon)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
