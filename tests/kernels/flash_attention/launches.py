"""The launches whose compilation `test_compiled.py` watches: each configuration, on meta tensors."""

from functools import partial

import torch

from kernels.flash_attention.triton_backward import backward
from kernels.flash_attention.triton_forward import forward


def _launch(dtype: torch.dtype, width: int, documents: bool) -> None:
    """Forward and backward: four kernels."""
    q, k, v, grad = (torch.empty(2, 4, 512, width, dtype=dtype, device="meta") for _ in range(4))
    starts = torch.empty(2, 512, dtype=torch.int64, device="meta") if documents else None
    out, lse = forward(q, k, v, starts)
    backward(grad, q, k, v, out, lse, starts)


LAUNCHES = {
    "float32 width 64": partial(_launch, torch.float32, 64, False),
    "float32 width 128": partial(_launch, torch.float32, 128, False),
    "bfloat16 width 64 documents": partial(_launch, torch.bfloat16, 64, True),
    "bfloat16 width 80": partial(_launch, torch.bfloat16, 80, False),
}
