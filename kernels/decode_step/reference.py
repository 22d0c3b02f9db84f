"""The decode step in torch, on any device and in any dtype: the model's forward as its formulas read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.decode_step.weights import Block, Linear, Norm, PlainWeights, dequantized
from kernels.nf4 import PackedNf4, nf4_linear


def step(
    weights: PlainWeights,
    token_ids: Tensor,
    positions: Tensor,
    page_table: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    needs_logits: Tensor | None,
) -> Tensor:
    """As `decode_step`, in the dtype of the embeddings."""
    refuse_misfits(len(weights.token_embedding), len(weights.position_embedding), token_ids, positions)
    refuse_pages(page_table, positions, key_pages[0])
    x = weights.token_embedding[token_ids] + weights.position_embedding[positions]
    for block, keys, values in zip(weights.blocks, key_pages, value_pages, strict=True):
        x = _block(x, block, weights, positions, page_table, keys, values)
    if needs_logits is not None:
        x = x[needs_logits]
    return _linear(_normalize(x, weights.final_norm, weights.epsilon), weights.head)


def refuse_misfits(vocabulary: int, context: int, token_ids: Tensor, positions: Tensor) -> None:
    """ValueError that names the first row whose token or position is none of the model's."""
    for row, (token, position) in enumerate(zip(token_ids.tolist(), positions.tolist(), strict=True)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"row {row}: token id {token} is outside the vocabulary of {vocabulary}")
        if not 0 <= position < context:
            raise ValueError(f"row {row}: position {position} is outside the maximum context {context}")


def refuse_pages(page_table: Tensor, positions: Tensor, pages: Tensor) -> None:
    """ValueError that names the first row whose table has too few pages or one that is not there."""
    page_count, _, page_size, _ = pages.shape
    for row, (table, position) in enumerate(zip(page_table.tolist(), positions.tolist(), strict=True)):
        used = position // page_size + 1
        if used > len(table):
            raise ValueError(f"row {row}: position {position} needs {used} pages, its table has {len(table)}")
        outside = [page for page in table[:used] if not 0 <= page < page_count]
        if outside:
            raise ValueError(f"row {row}: its table names page {outside[0]} outside 0...{page_count - 1}")


def _block(
    x: Tensor,
    block: Block,
    weights: PlainWeights,
    positions: Tensor,
    page_table: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    def heads(linear: Linear) -> Tensor:
        return _linear(a, linear).unflatten(-1, (weights.head_count, -1))  # [R, H, d]

    a = _normalize(x, block.attention_norm, weights.epsilon)
    page_size = keys.shape[2]
    pages = page_table.gather(1, (positions // page_size)[:, None])[:, 0]
    keys[pages, :, positions % page_size] = heads(block.key).to(keys.dtype)
    values[pages, :, positions % page_size] = heads(block.value).to(values.dtype)
    context = _attend(heads(block.query), positions, page_table, keys, values)
    x = x + _linear(context.flatten(1), block.output)
    a = _normalize(x, block.feed_forward_norm, weights.epsilon)
    return x + _linear(functional.gelu(_linear(a, block.expand)), block.project)


def _attend(q: Tensor, positions: Tensor, page_table: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each row over its sequence's positions up to its own: `[R, H, d]`."""
    if not len(q):
        return q
    page_size = keys.shape[2]
    span = torch.arange(int(positions.max()) + 1, device=q.device)
    hidden = span > positions[:, None]  # [R, span]
    pages = page_table[:, span // page_size].masked_fill(hidden, 0)
    k = keys[pages, :, span % page_size].to(q.dtype)  # [R, span, H, d]
    v = values[pages, :, span % page_size].to(q.dtype).masked_fill(hidden[:, :, None, None], 0)
    scores = torch.einsum("rhd,rshd->rhs", q, k) / math.sqrt(q.shape[2])
    weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return torch.einsum("rhs,rshd->rhd", weights, v)


def _normalize(x: Tensor, norm: Norm, epsilon: float) -> Tensor:
    return functional.layer_norm(x, norm.scale.shape, norm.scale, norm.bias, epsilon)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    if isinstance(linear.weight, PackedNf4):
        return nf4_linear(x, linear.weight, linear.bias)
    return functional.linear(x, dequantized(linear.weight).to(x.dtype), linear.bias)
