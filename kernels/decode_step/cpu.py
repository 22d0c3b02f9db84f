"""The decode step by `native/decode_step.cpp`, and the panels that it reads weights from."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.functional import pad

from kernels.decode_step.weights import Kind, Linear, Norm, PlainWeights, dequantized
from kernels.native import Pointer, function
from kernels.nf4 import PackedNf4
from kernels.nf4.reference import decode_scales
from kernels.operands import RUN

_PANEL = 16
_FLOAT32, _BFLOAT16, _NF4, _INT8 = range(4)
_ZERO_CODE = 7

_Integer = ctypes.c_int64
_native = function("riftco_decode_step", Pointer, Pointer, _Integer, Pointer, _Integer)
_pack = function("riftco_pack_panels", Pointer, *(_Integer,) * 3, Pointer, _Integer)
_pack_fixed = function("riftco_pack_fixed", Pointer, *(_Integer,) * 3, Pointer, Pointer, *(_Integer,) * 2)

built = None not in (_native, _pack, _pack_fixed)  # a library of an older build has no fixed point


class _Matrix(ctypes.Structure):
    """`Matrix` of decode_step.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("panels", "scales", "bias")),
        *((name, _Integer) for name in ("kind", "inputs", "outputs", "run")),
    )


class _Norm(ctypes.Structure):
    """`Norm` of decode_step.cpp."""

    _fields_ = (("scale", Pointer), ("bias", Pointer))


class _Layer(ctypes.Structure):
    """`Layer` of decode_step.cpp."""

    _fields_ = (
        ("attention_norm", _Norm),
        ("query_key_value", _Matrix),
        ("output", _Matrix),
        ("feed_forward_norm", _Norm),
        ("expand", _Matrix),
        ("project", _Matrix),
    )


class _Model(ctypes.Structure):
    """`Model` of decode_step.cpp."""

    _fields_ = (
        *((name, _Integer) for name in ("width", "heads", "blocks", "inner", "vocabulary")),
        ("epsilon", ctypes.c_double),
        *((name, Pointer) for name in ("token_embedding", "position_embedding", "layers")),
        ("final_norm", _Norm),
        ("head", _Matrix),
    )


class _Rows(ctypes.Structure):
    """`Rows` of decode_step.cpp."""

    _fields_ = (
        *((name, _Integer) for name in ("count", "table_width", "pages", "page_size", "positions")),
        *((name, Pointer) for name in ("token_ids", "position", "table", "needs_logits")),
        *((name, Pointer) for name in ("key_pages", "value_pages")),
    )


class Panels:
    """A model's matrices packed for the native step, and all else that it reads: `bytes` in a step.

    kind: what matrices are rounded to, those aside that are packed to NF4.
    """

    def __init__(self, plain: PlainWeights, kind: Kind) -> None:
        self._kind = kind
        self._alive: list[Tensor] = []
        self.bytes = 0
        self.context = len(plain.position_embedding)
        layers = (_Layer * len(plain.blocks))(
            *(
                _Layer(
                    self._norm(block.attention_norm),
                    self._matrix(block.query, block.key, block.value),
                    self._matrix(block.output),
                    self._norm(block.feed_forward_norm),
                    self._matrix(block.expand),
                    self._matrix(block.project),
                )
                for block in plain.blocks
            )
        )
        vocabulary, width = plain.token_embedding.shape
        inner = len(plain.blocks[0].expand.bias)
        self._layers = layers
        self.model = _Model(
            *(width, plain.head_count, len(plain.blocks), inner, vocabulary, plain.epsilon),
            self._keep(plain.token_embedding),
            self._keep(plain.position_embedding),
            ctypes.cast(layers, Pointer),
            self._norm(plain.final_norm),
            self._matrix(plain.head),
        )

    def _keep(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return tensor.data_ptr()

    def _norm(self, norm: Norm) -> _Norm:
        self.bytes += norm.scale.nbytes + norm.bias.nbytes
        return _Norm(self._keep(norm.scale), self._keep(norm.bias))

    def _matrix(self, *linears: Linear) -> _Matrix:
        """Matrices of one shape as one, below each other."""
        bias = _whole_panels(torch.cat([linear.bias for linear in linears]))
        weights = [linear.weight for linear in linears]
        outputs, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        packed = [weight for weight in weights if isinstance(weight, PackedNf4)]
        run = math.gcd(RUN, inputs, *(weight.block_size for weight in packed)) if packed else RUN
        scales = None
        if len(packed) == len(weights) and run % 4 == 0:
            kind, panels, scales = _NF4, _code_panels(packed), _scale_panels(packed, run)
        else:
            floats = [dequantized(weight) for weight in weights]
            if self._kind in ("bfloat16", "int8"):
                in_bytes = self._kind == "int8"
                kind, (panels, scales) = _INT8 if in_bytes else _BFLOAT16, pack_fixed_panels(floats, in_bytes)
            else:
                kind, panels = _FLOAT32, pack_panels(floats)
        self.bytes += panels.nbytes + bias.nbytes + (0 if scales is None else scales.nbytes)
        scale_pointer = None if scales is None else self._keep(scales)
        return _Matrix(self._keep(panels), scale_pointer, self._keep(bias), kind, inputs, outputs, run)


class Pages:
    """Where the pages of every block lie, as the native step reads it."""

    def __init__(self, key_pages: Sequence[Tensor], value_pages: Sequence[Tensor]) -> None:
        pointers = Pointer * len(key_pages)
        self._arrays = [pointers(*[x.data_ptr() for x in pages]) for pages in (key_pages, value_pages)]
        self.pointers = [ctypes.cast(array, Pointer) for array in self._arrays]
        self.count, _, self.size, _ = key_pages[0].shape
        self.half = key_pages[0].dtype == torch.bfloat16
        self.counted = [x for x in (*key_pages, *value_pages) if not x.is_inference()]


def step(
    panels: Panels,
    pages: Pages,
    token_ids: Tensor,
    positions: Tensor,
    page_table: Tensor,
    needs_logits: Tensor | None,
    threads: int,
) -> Tensor | None:
    """As `decode_step`; None, with nothing written, if a token, position or table does not fit."""
    assert _native is not None
    model, count = panels.model, len(token_ids)
    needed = count if needs_logits is None else needs_logits.tolist().count(True)
    logits = token_ids.new_empty(needed, model.vocabulary, dtype=torch.float32)
    token_ids, positions = token_ids.contiguous(), positions.contiguous()
    table = page_table.to(torch.int64).contiguous()
    needs_logits = None if needs_logits is None else needs_logits.contiguous()
    rows = _Rows(
        *(count, table.shape[1], pages.count, pages.size, panels.context),
        *(token_ids.data_ptr(), positions.data_ptr(), table.data_ptr()),
        None if needs_logits is None else needs_logits.data_ptr(),
        *pages.pointers,
    )
    misfit = _native(ctypes.byref(model), ctypes.byref(rows), pages.half, logits.data_ptr(), threads)
    if misfit:
        return None
    increment_version(pages.counted)
    return logits


def _whole_panels(x: Tensor, value: int = 0) -> Tensor:
    """Outputs, the first dimension, rounded up to whole panels."""
    return pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % _PANEL), value=value)


def pack_panels(matrices: list[Tensor]) -> Tensor:
    """Contiguous float32 matrices `[out, in]`, below each other, as `[panels, in, PANEL]`."""
    assert _pack is not None
    outputs, inputs = matrices[0].shape
    packed = matrices[0].new_empty(-(-len(matrices) * outputs // _PANEL), inputs, _PANEL)
    _pack(*_located(matrices), outputs, inputs, packed.data_ptr(), torch.get_num_threads())
    return packed


def pack_fixed_panels(matrices: list[Tensor], in_bytes: bool = False) -> tuple[Tensor, Tensor]:
    """The same rounded to bfloat16, as whole numbers int16 `[panels, runs, RUN / 2, PANEL, 2]` and scales.

    The scales of RUN inputs of an output are float32 `[panels, runs, PANEL]`; inputs are padded with zeros.
    in_bytes: the numbers of `Int8Weight`, 128 more, as uint8 `[panels, runs, RUN / 4, PANEL, 4]`.
    """
    assert _pack_fixed is not None
    outputs, inputs = matrices[0].shape
    panels, runs = -(-len(matrices) * outputs // _PANEL), -(-inputs // RUN)
    dtype, in_word = (torch.uint8, 4) if in_bytes else (torch.int16, 2)
    numbers = matrices[0].new_empty(panels, runs, RUN // in_word, _PANEL, in_word, dtype=dtype)
    scales = matrices[0].new_empty(panels, runs, _PANEL)
    places = (numbers.data_ptr(), scales.data_ptr(), in_bytes, torch.get_num_threads())
    _pack_fixed(*_located(matrices), outputs, inputs, *places)
    return numbers, scales


def _located(matrices: list[Tensor]) -> tuple[Any, int]:
    return (Pointer * len(matrices))(*(matrix.data_ptr() for matrix in matrices)), len(matrices)


def _code_panels(weights: list[PackedNf4]) -> Tensor:
    """Codes as uint8 `[panels, in / 4, 32]`, in the order that decode_step.cpp says."""
    unpacked = [
        torch.stack((w.codes & 15, w.codes >> 4), 1).flatten()[: w.shape[0] * w.shape[1]].view(w.shape)
        for w in weights
    ]
    codes = _whole_panels(torch.cat(unpacked), _ZERO_CODE)
    # Output = 8 group + 4 half + o; input = 4 quad + 2 pair + k.
    panels = codes.view(-1, 2, 2, 4, codes.shape[1] // 4, 2, 2).permute(0, 4, 5, 2, 1, 3, 6)
    return (panels[:, :, 0] | panels[:, :, 1] << 4).contiguous()


def _scale_panels(weights: list[PackedNf4], run: int) -> Tensor:
    """The float32 scale of each run of inputs, `[panels, in / run, PANEL]`."""

    def of_rows(w: PackedNf4) -> Tensor:
        first = torch.arange(0, w.shape[0] * w.shape[1], run, device=w.codes.device).view(w.shape[0], -1)
        return decode_scales(w.fields())[first // w.block_size]

    return pack_panels([of_rows(w) for w in weights])
