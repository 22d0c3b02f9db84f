"""Causal attention as the formula reads (Vaswani et al. 2017), in any floating dtype, on any device."""

import math

import torch
from torch import Tensor

_ROWS = 256  # queries at a time: the scores of more never exist at once


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, document_starts: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with position i seeing j <= i; all `[B, H, T, d]`.

    With `document_starts`, int32 or int64 `[B, T]`, it sees only j >= document_starts[b, i].
    """
    length, width = q.shape[-2:]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    if document_starts is not None:
        hidden = hidden | (torch.arange(length, device=q.device) < document_starts[:, None, :, None])
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(width))
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def forward(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The attention and the log-sum-exp of each row of scores, computed in float32 or, for it, float64."""
    out, lse = empty_heads(q, q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    wide_q, wide_k, wide_v = (_wide(x) for x in (q, k, v))
    for begin in range(0, q.shape[2], _ROWS):
        rows = slice(begin, begin + _ROWS)
        scores = _scores(wide_q[:, :, rows], wide_k, begin + k.shape[2] - q.shape[2], document_starts, rows)
        row_lse = scores.logsumexp(-1)
        probabilities = _probabilities(scores, row_lse)
        out[:, :, rows] = (probabilities @ wide_v).to(out.dtype)
        lse[:, :, rows] = row_lse
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, document_starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; probabilities are computed again, the log-sum-exp with them."""
    wide_grad, wide_q, wide_k, wide_v, wide_out = (_wide(x) for x in (grad, q, k, v, out))
    scale = 1.0 / math.sqrt(q.shape[-1])
    dq, dk, dv = empty_heads(q, q.shape), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for begin in range(0, q.shape[2], _ROWS):
        rows = slice(begin, begin + _ROWS)
        d_out, part = wide_grad[:, :, rows], wide_q[:, :, rows]
        scores = _scores(part, wide_k, begin + k.shape[2] - q.shape[2], document_starts, rows)
        probabilities = _probabilities(scores, scores.logsumexp(-1))
        delta = (d_out * wide_out[:, :, rows]).sum(-1, keepdim=True)
        d_scores = probabilities * (d_out @ wide_v.mT - delta) * scale
        dq[:, :, rows] = (d_scores @ wide_k).to(dq.dtype)
        dk += d_scores.mT @ part
        dv += probabilities.mT @ d_out
    heads_k, heads_v = empty_heads(k, k.shape), empty_heads(v, v.shape)
    return dq, heads_k.copy_(dk), heads_v.copy_(dv)


def empty_heads(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[B, H, T, d]` in memory as `[B, T, H, d]`, so that merging the heads afterwards copies nothing."""
    batch, heads, tokens, width = shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, first: int, document_starts: Tensor | None, rows: slice) -> Tensor:
    """`[B, H, rows, keys]`, -inf where hidden; the first row sees keys up to position `first`."""
    position = torch.arange(k.shape[2], device=q.device)
    last = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
    hidden = position > last
    if document_starts is not None:
        hidden = hidden | (position < document_starts[:, None, rows, None])
    return (q @ k.mT * (1.0 / math.sqrt(q.shape[-1]))).masked_fill(hidden, -math.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """softmax, and 0 throughout for rows that see nothing."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
