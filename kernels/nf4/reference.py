"""NF4 as its encoding reads, in torch operations on any device; every step rounds to float32 by itself."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.nf4.packed import CODE_VALUES, Weight

_ZERO_CODE = 7
_LARGEST = torch.finfo(torch.float32).max


def quantize_blocks(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte, and a float32 scale per block, the largest magnitude in it."""
    flat = weight.flatten()
    blocks = pad(flat, (0, -len(flat) % block_size)).view(-1, block_size)
    scales = blocks.abs().amax(1)
    codes = _nearest(blocks / scales[:, None])
    codes[scales == 0] = _ZERO_CODE
    pairs = pad(codes.flatten()[: len(flat)], (0, len(flat) % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4, scales


def _nearest(ratio: Tensor) -> Tensor:
    """The code nearest to each element, the lower one of two equally near."""
    codes = torch.zeros_like(ratio, dtype=torch.uint8)
    least = (ratio - CODE_VALUES[0]).abs()
    for code, value in enumerate(CODE_VALUES[1:], 1):
        distance = (ratio - value).abs()
        codes[distance < least] = code
        least = torch.minimum(least, distance)
    return codes


def quantize_scales(scales: Tensor, scale_block_size: int) -> tuple[Tensor, Tensor, float]:
    """uint8 codes of the scales around their mean, a float32 scale per group of them, and the mean.

    The mean is summed in float64 in the order of the blocks, on the CPU: GPUs add in another order, and Metal
    has no float64.
    """
    offset = float((scales.cpu().double().cumsum(0)[-1] / len(scales)).float())
    groups = pad(scales - offset, (0, -len(scales) % scale_block_size)).view(-1, scale_block_size)
    group_scales = groups.abs().amax(1)
    z = groups / group_scales[:, None] * 127
    rounded = torch.where(z >= 0, (z + 0.5).floor(), (z - 0.5).ceil()).clamp(-127, 127)
    rounded = torch.where(group_scales[:, None] == 0, 0.0, rounded)
    codes = (rounded + 128).to(torch.uint8).flatten()[: len(scales)]
    return codes.contiguous(), group_scales, offset


def decode_scales(w: Weight) -> Tensor:
    """The float32 scale of each block."""
    if w.group_scales is None:
        return w.scales
    ratios = (w.scales.float() - 128) / 127
    groups = w.group_scales.repeat_interleave(w.scale_block_size)[: len(ratios)]
    return (groups * ratios + w.offset).clamp(0, _LARGEST)


def decode(w: Weight, first_row: int, first_column: int, out: Tensor) -> None:
    """Fill `out` with the rectangle of the weight that begins there."""
    device = w.codes.device
    rows = torch.arange(first_row, first_row + out.shape[0], device=device)[:, None] * w.columns
    element = rows + torch.arange(first_column, first_column + out.shape[1], device=device)
    codes = w.codes[element >> 1] >> (element % 2 * 4).to(torch.uint8) & 15
    values = torch.tensor(CODE_VALUES, dtype=torch.float32, device=device)[codes.int()]
    scales = decode_scales(w)[element // w.block_size]
    out.copy_(torch.where(scales == 0, 0.0, scales * values))  # never -0


def dequantize(codes: Tensor, w: Weight) -> Tensor:
    """The float32 weight; some rows at a time, because the indices take far more memory than it does."""
    out = codes.new_empty(w.rows, w.columns, dtype=torch.float32)
    step = max(2**20 // w.columns, 1)
    for first in range(0, w.rows, step):
        decode(w, first, 0, out[first : first + step])
    return out
