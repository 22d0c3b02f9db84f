"""The launches of cross-entropy that are compiled for GPUs."""

from collections.abc import Callable
from functools import partial

import torch

from kernels.cross_entropy import triton_cross_entropy


def _launch(dtype: torch.dtype, columns: int, masked: bool) -> None:
    logits = torch.empty(2048, columns, dtype=dtype, device="meta")
    targets = torch.empty(2048, dtype=torch.int64, device="meta")
    mask = torch.empty(2048, dtype=torch.bool, device="meta") if masked else None
    loss, statistics = triton_cross_entropy.forward(logits, targets, mask, True)
    triton_cross_entropy.backward(torch.empty_like(loss), logits, targets, mask, statistics, True)


LAUNCHES: dict[str, Callable[[], None]] = {
    "float32 4096": partial(_launch, torch.float32, 4096, False),
    "bfloat16 4096 masked": partial(_launch, torch.bfloat16, 4096, True),
    "bfloat16 50257": partial(_launch, torch.bfloat16, 50257, False),
    "bfloat16 300": partial(_launch, torch.bfloat16, 300, False),
}
