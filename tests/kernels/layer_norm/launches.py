"""The launches of layer norm that are compiled for GPUs."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.layer_norm import triton_layer_norm


def _launch(dtype: torch.dtype, width: int, fused: bool) -> None:
    x = torch.empty(8192, width, dtype=dtype, device="meta")
    scale = torch.empty(width, device="meta")
    residual = torch.empty_like(x) if fused else None
    _, total, mean, rstd = triton_layer_norm.forward(x, residual, scale, scale, 1e-5)
    triton_layer_norm.backward(x, residual, total if fused else x, mean, rstd, scale, scale)


LAUNCHES: dict[str, Callable[[], None]] = {
    "float32 256": partial(_launch, torch.float32, 256, False),
    "bfloat16 256 with residual": partial(_launch, torch.bfloat16, 256, True),
    "bfloat16 4096 with residual": partial(_launch, torch.bfloat16, 4096, True),
    "float32 widest with residual": partial(_launch, torch.float32, triton_layer_norm.WIDEST, True),
}
