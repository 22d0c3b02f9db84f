"""Causal self-attention over whole sequences.

`flash_attention` keeps no `[B, H, T, T]` matrix: it saves one log-sum-exp for each row and computes the
probabilities again in its backward (Dao et al. 2022). `materialized_attention` is the definition written
out and keeps the probabilities. Both are differentiable and agree within float32 rounding.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from kernels.dispatch import Operation
from kernels.flash_attention import cpu, reference
from kernels.flash_attention.reference import causal_attention as materialized_attention
from kernels.operands import AttentionOperands
from kernels.operators import define

__all__ = ["flash_attention", "materialized_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    document_starts: Tensor | None = None,
    operands: AttentionOperands = "full",
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal; q is `[B, H, Tq, d]`, k and v `[B, H, Tk, d]`, the result like q.

    Queries are the last of the keys' positions: query i sees keys j <= i + Tk - Tq, and 0 comes out where
    it sees none. With `document_starts`, int32 or int64 `[B, T]` for Tq = Tk = T, position i sees only j >=
    document_starts[b, i], the first position of the document that it belongs to.

    float32, bfloat16 or float64 (in torch); one dtype and device. Products take their factors, probabilities
    and gradients too, in float32 on CPUs; with `operands="half"` they round them to bfloat16 where a CPU
    multiplies that faster (AVX-512 BF16), as GPUs do then, and for bfloat16 always. Differentiable once
    in q, k and v; the gradients are the same bits each time. The result lies in memory as `[B, T, H, d]`.
    ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(q, k, v)
    if operands not in get_args(AttentionOperands):
        raise ValueError(f"operands must be full or half, got {operands!r}")
    if document_starts is not None:
        _check_starts(document_starts, q, k)
    return _flash_attention(q, k, v, document_starts, operands)[0]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or not q.shape[3]:
        raise ValueError(f"q and k must be [B, H, T, d] with d >= 1, got {list(q.shape)} and {list(k.shape)}")
    expected = (*q.shape[:2], k.shape[2], q.shape[3])
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be {q.dtype} {list(expected)} on {q.device} as q is, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )
    if q.dtype not in _DTYPES:
        raise ValueError(f"q must be float32, bfloat16 or float64, got {q.dtype}; convert q, k and v")


def _check_starts(document_starts: Tensor, q: Tensor, k: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"document_starts needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
    expected = (q.shape[0], q.shape[2])
    if document_starts.shape != expected or document_starts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"document_starts must be int32 or int64 {list(expected)}, "
            f"got {document_starts.dtype} {list(document_starts.shape)}"
        )
    if document_starts.device != q.device:
        raise ValueError(f"document_starts must be on {q.device} as q is, got {document_starts.device}")


def _torch_forward(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, operands: AttentionOperands
) -> tuple[Tensor, Tensor]:
    return reference.forward(q, k, v, document_starts)


def _torch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_starts: Tensor | None,
    operands: AttentionOperands,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.backward(grad, q, k, v, out, document_starts)


def _triton_forward(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None, operands: AttentionOperands
) -> Any:
    from kernels.flash_attention.triton_forward import forward

    dtype = q.dtype
    q, k, v = (_factor(x, operands) for x in (q, k, v))
    found = forward(q, k, v, document_starts)
    return found if found is NotImplemented else (found[0].to(dtype), found[1])


def _triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_starts: Tensor | None,
    operands: AttentionOperands,
) -> Any:
    from kernels.flash_attention.triton_backward import backward

    dtype = q.dtype
    grad, q, k, v, out = (_factor(x, operands) for x in (grad, q, k, v, out))
    found = backward(grad, q, k, v, out, lse, document_starts)
    return found if found is NotImplemented else tuple(x.to(dtype) for x in found)


def _factor(x: Tensor, operands: AttentionOperands) -> Tensor:
    """As the kernels' matrix units take it; float64 stays for the definition."""
    return x.bfloat16() if operands == "half" and x.dtype == torch.float32 else x


_forward = Operation(
    "flash_attention",
    torch=_torch_forward,
    native=cpu.forward if cpu.built else None,
    triton=_triton_forward,
)
_backward = Operation(
    "flash_attention_backward",
    torch=_torch_backward,
    native=cpu.backward if cpu.built else None,
    triton=_triton_backward,
)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return reference.empty_heads(q, q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (reference.empty_heads(x, x.shape) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_starts, ctx.operands = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, document_starts)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, document_starts = ctx.saved_tensors
    found = _flash_attention_backward(grad, q, k, v, out, lse, document_starts, ctx.operands)
    return (*found, None, None)


def _pairs(queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees, without documents."""
    seeing = min(queries, keys)
    return seeing * (keys - seeing) + seeing * (seeing + 1) // 2


def _forward_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    return 4 * q[0] * q[1] * q[3] * _pairs(q[2], k[2])


def _backward_flops(grad: Any, q: Any, k: Any, *_: Any, **__: Any) -> int:
    return 10 * q[0] * q[1] * q[3] * _pairs(q[2], k[2])


_flash_attention_backward = define(
    "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? document_starts, str operands) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_fake_backward,
    flops=_backward_flops,
)
_flash_attention = define(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? document_starts, str operands) "
    "-> (Tensor, Tensor)",
    _forward,
    fake=_fake_forward,
    backward=_differentiate,
    setup_context=_save,
    flops=_forward_flops,
)
