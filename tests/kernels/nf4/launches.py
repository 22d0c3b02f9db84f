"""The launches that `kernels.nf4` makes on a GPU, on meta tensors."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.nf4 import linear_backward, linear_forward, triton_nf4
from kernels.nf4.packed import PackedNf4, Weight


def packed(rows: int, columns: int, double: bool) -> Weight:
    """A packed weight without values."""
    count = rows * columns
    codes = torch.empty(count // 2, dtype=torch.uint8, device="meta")
    blocks = count // 64
    if not double:
        scales = torch.empty(blocks, device="meta")
        return PackedNf4(codes, scales, (rows, columns), 64).fields()
    scales, groups = codes.new_empty(blocks), torch.empty(blocks // 256, device="meta")
    return PackedNf4(codes, scales, (rows, columns), 64, groups, 0.5, 256).fields()


def few_rows(dtype: torch.dtype, double: bool) -> None:
    x = torch.empty(1, 512, dtype=dtype, device="meta")
    triton_nf4.forward(x, packed(256, 512, double), None, False)


def many_rows(dtype: torch.dtype) -> None:
    w = packed(256, 512, True)
    linear_forward(torch.empty(64, 512, dtype=dtype, device="meta"), w, None, False)
    linear_backward(torch.empty(64, 256, dtype=dtype, device="meta"), w, False)


LAUNCHES: dict[str, Callable[[], None]] = {
    "quantize": lambda: triton_nf4.quantize_blocks(torch.empty(256, 512, device="meta"), 64),
    "few rows float32": partial(few_rows, torch.float32, True),
    "few rows bf16": partial(few_rows, torch.bfloat16, True),
    "few rows bf16, float32 scales": partial(few_rows, torch.bfloat16, False),
    "many rows bf16": partial(many_rows, torch.bfloat16),
}
