"""Attention by `native/flash_attention_*.cpp`: float32 and bfloat16, any strides of batch, heads and tokens.

Scratch is linear in T: per thread some 2 (forward) or 6 (backward) float32 copies of one head's `[T, d]`.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.flash_attention.reference import empty_heads
from kernels.native import Integer, Pointer, function, pointer
from kernels.operands import AttentionOperands

_SIGNATURE = (Pointer, Pointer, Pointer, Pointer, Pointer, Integer, Integer, Pointer, Integer)
_forward, _backward = (
    (
        function(f"riftco_flash_attention_{name}", *_SIGNATURE),
        function(f"riftco_flash_attention_{name}_scratch", Pointer, Integer, result=Integer),
    )
    for name in ("forward", "backward")
)

built = _forward[0] is not None


def forward(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, operands: AttentionOperands
) -> Any:
    """Attention `[B, H, Tq, d]` and log-sum-exp; NotImplemented unless float32 or bfloat16."""
    if q.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    out, lse = empty_heads(q, q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    _call(_forward, [_rows(x) for x in (q, k, v)] + [out], lse, document_starts, k.shape[2], operands)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_starts: Tensor | None,
    operands: AttentionOperands,
) -> Any:
    """Gradients of q, k and v, as above."""
    if q.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    gradients = [empty_heads(x, x.shape) for x in (q, k, v)]
    inputs = [_rows(x) for x in (grad, q, k, v, out)]
    _call(_backward, inputs + gradients, lse.contiguous(), document_starts, k.shape[2], operands)
    return tuple(gradients)


def _call(
    functions: tuple[Any, Any],
    tensors: list[Tensor],
    lse: Tensor,
    document_starts: Tensor | None,
    keys: int,
    operands: AttentionOperands,
) -> None:
    run, scratch_size = functions
    threads, half = torch.get_num_threads(), int(operands == "half")
    batch, heads, queries, width = tensors[0].shape
    sizes = (Integer * 5)(batch, heads, queries, keys, width)
    scratch = lse.new_empty(scratch_size(sizes, half) * threads)
    if document_starts is not None:
        document_starts = document_starts.to(torch.int64).contiguous()
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    run(
        sizes,
        pointer(document_starts),
        (Pointer * len(tensors))(*(x.data_ptr() for x in tensors)),
        pointer(lse),
        (Integer * len(strides))(*strides),
        int(tensors[0].dtype == torch.bfloat16),
        half,
        pointer(scratch),
        threads,
    )


def _rows(x: Tensor) -> Tensor:
    """x with contiguous rows, copied only if they are not."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
