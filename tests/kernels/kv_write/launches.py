"""The launches whose compilation `test_compiled.py` watches, on meta tensors."""

from functools import partial

import torch

from kernels.kv_write.triton_write import write


def _launch(dtype: torch.dtype) -> None:
    pages = torch.empty(64, 8, 16, 64, dtype=dtype, device="meta")
    new = torch.empty(4, 8, 64, dtype=dtype, device="meta")
    write(pages, pages, new, new, torch.empty(4, dtype=torch.int64, device="meta"))


LAUNCHES = {"float32": partial(_launch, torch.float32), "bfloat16": partial(_launch, torch.bfloat16)}
