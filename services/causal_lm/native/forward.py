"""A forward pass through the C kernel: packs the weights once, then hands over pointers.

Logits and hidden states of a row depend, to the last bit, on the tokens of its path alone.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.causal_lm.formats import quantize
from services.causal_lm.forward import Output, Segment, given_inputs
from services.causal_lm.rows import Rows
from services.causal_lm.settings import WEIGHT_FORMATS
from services.causal_lm.weights import Linear, Norm, Weights

PARTS = ("qkv", "attention", "output", "up", "down", "head", "other")
"""What the kernel books its time under."""

LINEAR_PARTS = ("qkv", "output", "up", "down", "head")


class _Linear(Structure):
    _fields_ = [
        ("format", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("weights", c_void_p),
        ("bias", c_void_p),
    ]


class _Segment(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("parents", c_void_p),
        ("capacity", c_int64),
        ("length", c_int32),
        ("path_length", c_int32),
        ("num_new", c_int32),
        ("first_row", c_int32),
    ]


class _Heads(Structure):
    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
    ]


class _Layer(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("norm1", "norm1_bias", "norm2", "norm2_bias", "query_norm", "key_norm")
        ),
        *((name, _Linear) for name in ("qkv", "output", "up", "down")),
    ]


class _Model(Structure):
    _fields_ = [
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("gated", c_int32),
        ("epsilon", c_float),
        ("heads", _Heads),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("norm", c_void_p),
        ("norm_bias", c_void_p),
        ("layers", POINTER(_Layer)),
        ("head", _Linear),
    ]


class _Pass(Structure):
    _fields_ = [
        ("model", POINTER(_Model)),
        ("num_segments", c_int32),
        ("num_rows", c_int32),
        ("num_wanted", c_int32),
        ("num_threads", c_int32),
        ("segments", POINTER(_Segment)),
        ("hidden", c_void_p),
        ("wanted", c_void_p),
        ("logits", c_void_p),
        ("seconds", POINTER(c_double)),
    ]


class NativeForward:
    """A model packed for the C kernel."""

    def __init__(self, library: ctypes.CDLL, weights: Weights, weight_format: str, num_threads: int) -> None:
        """Packs a model.

        Args:
            library: From `native_library`.
            weights: On the CPU.
            weight_format: One of `WEIGHT_FORMATS`.
            num_threads: Threads of a pass.
        """
        self._library = library
        self._format = weight_format
        self._num_threads = num_threads
        self._kept: list[Tensor] = []  # what the kernel points at
        self._dtype = torch.float32 if weight_format == "float32" else torch.float16
        self._embedding = weights.embedding.detach().to(self._dtype)
        self._positions = None
        if weights.position_embedding is not None:
            self._positions = weights.position_embedding.detach().to(self._dtype)
        self._hidden = self._embedding.shape[1]
        self._num_logits = weights.head.weight.shape[0]
        self._layers = (_Layer * len(weights.layers))()
        inner = 0
        for target, layer in zip(self._layers, weights.layers, strict=True):
            up, down = layer.up, layer.down
            if weights.gated:
                up, down = (
                    _interleaved(up, library.stagespec_lanes()),
                    _padded(down, library.stagespec_lanes()),
                )
            inner = down.weight.shape[1]
            self._set_norm(target, "norm1", layer.norm1)
            self._set_norm(target, "norm2", layer.norm2)
            target.query_norm = None if layer.query_norm is None else self._keep(layer.query_norm.weight)
            target.key_norm = None if layer.key_norm is None else self._keep(layer.key_norm.weight)
            for name, linear in (("qkv", layer.qkv), ("output", layer.output), ("up", up), ("down", down)):
                setattr(target, name, self._pack(linear))
        self._model = _Model(
            num_layers=len(weights.layers),
            hidden=self._hidden,
            inner=inner,
            gated=weights.gated,
            epsilon=weights.epsilon,
            heads=_Heads(weights.num_heads, weights.num_kv_heads, weights.head_dim, weights.head_dim**-0.5),
            cosines=None if weights.cosines is None else self._keep(weights.cosines),
            sines=None if weights.sines is None else self._keep(weights.sines),
            layers=self._layers,
            head=self._pack(weights.head),
        )
        self._set_norm(self._model, "norm", weights.norm)
        self._shape = (len(weights.layers), weights.num_kv_heads, weights.head_dim)
        self.seconds = (c_double * len(PARTS))()

    def new_rows(self) -> Rows:
        """See `services.causal_lm.forward.Forward`."""
        return Rows(*self._shape, torch.device("cpu"), torch.float32, self._library.stagespec_panel())

    @torch.inference_mode()
    def __call__(self, segments: Sequence[Segment]) -> list[Output]:
        """See `services.causal_lm.forward.Forward`."""
        native = (_Segment * len(segments))()
        alive = []
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for target, segment in zip(native, segments, strict=True):
            rows, first = segment.rows, len(segment.rows) - segment.num_new
            parents = rows.parents[rows.path_length :]
            alive.append((c_int32 * len(parents))(*parents))
            target.keys, target.values = rows.keys.data_ptr(), rows.values.data_ptr()
            target.parents = ctypes.addressof(alive[-1])
            target.capacity, target.length = rows.capacity, len(rows)
            target.path_length, target.num_new = rows.path_length, segment.num_new
            target.first_row = len(token_ids)
            wanted += [len(token_ids) + index for index in segment.wanted]
            token_ids += rows.token_ids[first:]
            if self._positions is not None:
                positions += [rows.position(row) for row in range(first, len(rows))]
        given = given_inputs(segments)
        if given is not None:
            hidden = given.to(torch.float32, copy=True).contiguous()  # the kernel writes over it
        else:
            hidden = self._embedding[torch.tensor(token_ids)].float()
        if self._positions is not None:
            hidden += self._positions[torch.tensor(positions)].float()
        logits = torch.empty(len(wanted), self._num_logits)
        indices = (c_int32 * len(wanted))(*wanted)
        task = _Pass(
            model=ctypes.pointer(self._model),
            num_segments=len(segments),
            num_rows=len(token_ids),
            num_wanted=len(wanted),
            num_threads=self._num_threads,
            segments=native,
            hidden=hidden.data_ptr(),
            wanted=ctypes.addressof(indices),
            logits=logits.data_ptr(),
            seconds=self.seconds,
        )
        if self._library.stagespec_forward(ctypes.byref(task)):
            raise MemoryError(f"there is no memory for a pass over {len(token_ids)} rows")
        return [
            Output(*pair)
            for pair in zip(
                torch.split(logits, [len(segment.wanted) for segment in segments]),
                torch.split(hidden, [segment.num_new for segment in segments]),
                strict=True,
            )
        ]

    def linear_only(self, num_rows: int) -> float:
        """Seconds that the linear layers of a pass over so many rows take, as the kernel's clock has it."""
        rows = self.new_rows()
        for _ in range(num_rows):
            rows.add(len(rows) - 1, 0)
        rows.grow_path(num_rows)
        before = self._linear_seconds()
        self([Segment(rows, num_rows, range(num_rows))])
        return self._linear_seconds() - before

    def _linear_seconds(self) -> float:
        return sum(self.seconds[PARTS.index(part)] for part in LINEAR_PARTS)

    def _set_norm(self, target: Any, name: str, norm: Norm) -> None:
        setattr(target, name, self._keep(norm.weight))
        setattr(target, f"{name}_bias", None if norm.bias is None else self._keep(norm.bias))

    def _keep(self, values: Tensor) -> int:
        """Address of some numbers in float32."""
        self._kept.append(values.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _pack(self, linear: Linear) -> _Linear:
        num_outputs, num_inputs = linear.weight.shape
        scales = torch.empty(0)
        if self._format == "int8":
            integers, scales = quantize(linear.weight.float(), 127)
            weight = integers.flatten(1)[:, :num_inputs].to(torch.int8).contiguous()
        else:
            weight = linear.weight.to(self._dtype).contiguous()
        kind = WEIGHT_FORMATS.index(self._format)
        num_bytes = self._library.stagespec_packed_bytes(kind, num_outputs, num_inputs)
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.stagespec_pack(
            kind,
            num_outputs,
            num_inputs,
            c_void_p(weight.data_ptr()),
            c_void_p(scales.contiguous().data_ptr()),
            c_void_p(packed.data_ptr()),
        )
        self._kept.append(packed)
        bias = None if linear.bias is None else self._keep(linear.bias)
        return _Linear(kind, num_outputs, num_inputs, packed.data_ptr(), bias)


def _interleaved(up: Linear, lanes: int) -> Linear:
    """Gates and values in turns of `lanes`, both padded with zeros to a multiple."""

    def mix(values: Tensor) -> Tensor:
        halves = values.reshape(2, values.shape[0] // 2, -1)
        halves = pad(halves, (0, 0, 0, -halves.shape[1] % lanes))
        return halves.reshape(2, -1, lanes, halves.shape[2]).transpose(0, 1).reshape(-1, halves.shape[2])

    bias = None if up.bias is None else mix(up.bias.unsqueeze(1)).squeeze(1)
    return Linear(mix(up.weight), bias)


def _padded(down: Linear, lanes: int) -> Linear:
    return Linear(pad(down.weight, (0, -down.weight.shape[1] % lanes)), down.bias)
