"""Linear weights in 4 bits (NF4, Dettmers et al. 2023): packing, what they take, how they are stored."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from artifacts import PackedNf4Weight, QuantizedScales
from kernels import PackedNf4, quantize_nf4
from riftco.model.layers import Linear


@dataclass(frozen=True, slots=True)
class QuantizedMemory:
    """Bytes of a model's packed weights: of codes, of the scales of their blocks, and of both (the payload).

    Of `scale_bytes`, `fp32_scale_bytes` are plain scales; the other three are double quantisation's.
    """

    weight_count: int = 0
    packed_code_bytes: int = 0
    scale_bytes: int = 0
    logical_payload_bytes: int = 0
    resident_payload_bytes: int = 0
    fp32_equivalent_bytes: int = 0
    fp32_scale_bytes: int = 0
    scale_code_bytes: int = 0
    second_level_scale_bytes: int = 0
    scale_offset_bytes: int = 0
    double_quantized_weight_count: int = 0

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than float32 the payload is; 0.0 without packed weights."""
        return self.fp32_equivalent_bytes / self.logical_payload_bytes if self.weight_count else 0.0

    @classmethod
    def of(cls, weights: Iterable[PackedNf4]) -> "QuantizedMemory":
        """The sum over the weights."""
        each = [_memory(weight) for weight in weights]
        return cls(**{f.name: sum(getattr(memory, f.name) for memory in each) for f in fields(cls)})


def _memory(weight: PackedNf4) -> QuantizedMemory:
    rows, columns = weight.shape
    double = weight.group_scales is not None
    codes, scales = weight.codes.nbytes, weight.scales.nbytes
    groups = 0 if weight.group_scales is None else weight.group_scales.nbytes
    offset = np.dtype(np.float32).itemsize if double else 0
    payload = codes + scales + groups + offset
    return QuantizedMemory(
        weight_count=1,
        packed_code_bytes=codes,
        scale_bytes=scales + groups + offset,
        logical_payload_bytes=payload,
        resident_payload_bytes=payload,
        fp32_equivalent_bytes=rows * columns * np.dtype(np.float32).itemsize,
        fp32_scale_bytes=0 if double else scales,
        scale_code_bytes=scales if double else 0,
        second_level_scale_bytes=groups,
        scale_offset_bytes=offset,
        double_quantized_weight_count=int(double),
    )


def pack(
    linears: Mapping[str, Linear], block_size: int, double_quantization: bool, scale_block_size: int
) -> None:
    """Replace every weight by its packed form; all or nothing.

    ValueError for sizes that NF4 does not have and for a weight, named, whose values are not finite.
    """
    packed = []
    for name, linear in linears.items():
        assert linear.weight is not None
        try:
            packed.append(quantize_nf4(linear.weight, block_size, double_quantization, scale_block_size))
        except ValueError as error:
            raise ValueError(f"cannot quantize {name}.weight: {error}") from None
    for linear, weight in zip(linears.values(), packed, strict=True):
        linear.packed, linear.weight = weight, None


def load(linears: Sequence[Linear], weights: Sequence[PackedNf4Weight]) -> None:
    """Replace the packed weights, in order; ValueError, before any change, unless shape fits shape."""
    shapes = [linear.packed.shape for linear in linears if linear.packed is not None]
    given = [weight.shape for weight in weights]
    if not shapes or given != shapes:
        raise ValueError(
            f"the packed state has weights {given} and the model has {shapes}; "
            "quantize a model of the same configuration first"
        )
    pairs = list(zip(linears, weights, strict=True))
    restored = [_restored(weight, linear.bias.device) for linear, weight in pairs]
    for linear, packed in zip(linears, restored, strict=True):
        linear.packed = packed


def stored(packed: PackedNf4) -> PackedNf4Weight:
    """As a checkpoint holds it, bit for bit."""
    codes, scales = packed.codes.numpy(force=True), packed.scales.numpy(force=True)
    if packed.group_scales is None or packed.scale_block_size is None:
        return PackedNf4Weight(packed.shape, packed.block_size, codes, scales)
    groups = packed.group_scales.numpy(force=True)
    nested = QuantizedScales(scales, groups, packed.scale_block_size, packed.offset)
    return PackedNf4Weight(packed.shape, packed.block_size, codes, nested)


def _restored(weight: PackedNf4Weight, device: torch.device) -> PackedNf4:
    """The live form of `stored`, on a device."""
    scales = weight.scales
    codes = torch.tensor(weight.codes, device=device)
    if not isinstance(scales, QuantizedScales):
        return PackedNf4(codes, torch.tensor(scales, device=device), weight.shape, weight.block_size)
    nested = torch.tensor(scales.codes, device=device), torch.tensor(scales.scales, device=device)
    return PackedNf4(
        codes, nested[0], weight.shape, weight.block_size, nested[1], scales.offset, scales.block_size
    )
