"""The launches of GELU that are compiled for GPUs."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.gelu import triton_gelu


def _launch(dtype: torch.dtype, biased: bool) -> None:
    x = torch.empty(4096, 3072, dtype=dtype, device="meta")
    bias = torch.empty(3072, dtype=dtype, device="meta") if biased else None
    triton_gelu.forward(x, bias)
    triton_gelu.backward(torch.empty_like(x), x, bias)


LAUNCHES: dict[str, Callable[[], None]] = {
    "float32": partial(_launch, torch.float32, True),
    "bfloat16": partial(_launch, torch.bfloat16, True),
    "bfloat16 without bias": partial(_launch, torch.bfloat16, False),
}
