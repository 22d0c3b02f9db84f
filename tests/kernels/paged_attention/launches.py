"""The launches whose compilation `test_compiled.py` watches: each configuration, on meta tensors."""

from functools import partial

import torch

from kernels.paged_attention.triton_forward import attend


def _launch(dtype: torch.dtype, width: int, counts: bool) -> None:
    q = torch.empty(4, 8, 1, width, dtype=dtype, device="meta")
    pages = torch.empty(64, 8, 16, width, dtype=dtype, device="meta")
    table = torch.empty(4, 16, dtype=torch.int64, device="meta")
    lengths = torch.empty(4, dtype=torch.int64, device="meta")
    attend(q, pages, pages, table, lengths, lengths if counts else None)


LAUNCHES = {
    "float32 width 64": partial(_launch, torch.float32, 64, False),
    "float32 width 128": partial(_launch, torch.float32, 128, False),
    "bfloat16 width 64 counts": partial(_launch, torch.bfloat16, 64, True),
    "bfloat16 width 128": partial(_launch, torch.bfloat16, 128, False),
}
