"""The parts of a block: embedding, norm, linear with an optional low-rank adapter, attention, feed-forward.

B batch, T time, n new tokens, D model width, H heads, d = D / H, F feed-forward width. Everything is float32.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import (
    Operands,
    PackedNf4,
    feed_forward,
    gelu,
    half_operand,
    linear,
    lora_linear,
    nf4_linear,
    qkv_linear,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v `[B, H, T, d]` to the context `[B, H, T, d]`."""


class KvCache(Protocol):
    """What the decode path asks of a request's key/value cache: a transaction over `count` new tokens."""

    @property
    def size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def begin(self, count: int = 1) -> None: ...
    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class Weight(nn.Module):
    """One weight matrix, uninitialised."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class Embedding(Weight):
    """A table of rows, looked up by id."""

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(population variance + epsilon) * scale + bias over the last axis."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.scale.shape, self.scale, self.bias, self.epsilon)


class Linear(nn.Module):
    """x W^T + b, plus scale * ((x A^T) B^T) once an adapter is attached; W is `[out, in]`.

    W is `weight`, uninitialised, or `packed` in 4 bits: the other of the two is None. `operands` says
    what factors of products are rounded to, as in `kernels.linear`.
    """

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.fan_in, self.fan_out = fan_in, fan_out
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(fan_out, fan_in))
        self.packed: PackedNf4 | None = None
        self.bias = nn.Parameter(torch.zeros(fan_out))
        self.lora_a: Weight | None = None
        self.lora_b: Weight | None = None
        self.lora_scale = 0.0
        self.operands: Operands = "full"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's result, added to the residual if there is one."""
        if self.plain:
            assert self.weight is not None
            return linear(x, self.weight, self.bias, residual=residual, operands=self.operands)
        return self._adapted(x, residual)

    @property
    def plain(self) -> bool:
        """Whether it is a dense layer without an adapter."""
        return self.weight is not None and self.lora_a is None

    def _adapted(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weight, lora_a, lora_b = self.packed or self.weight, self.lora_a, self.lora_b
        operands = self.operands
        assert weight is not None
        operand = half_operand if operands == "half" else lambda given: given
        given = operand(x)
        bias = self.bias.to(given.dtype)  # rounded only where bfloat16 is what is multiplied
        if lora_a is None or lora_b is None:
            assert isinstance(weight, PackedNf4)
            y = nf4_linear(given, weight, bias, operands=operands)
        else:
            base = weight if isinstance(weight, PackedNf4) else operand(weight)
            low_rank = operand(lora_a.weight), operand(lora_b.weight)
            inside = residual if given.dtype == x.dtype else None  # it is not rounded with the rest
            y = lora_linear(given, base, bias, *low_rank, self.lora_scale, residual=inside, operands=operands)
            residual = None if inside is not None else residual
        return y.to(x.dtype) if residual is None else residual + y.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Where the bias goes, the packed weight goes."""
        super()._apply(fn, recurse)
        if self.packed is not None:
            self.packed = self.packed.to(self.bias.device)
        return self


class Attention(nn.Module):
    """Separate query, key, value and output projections around an attention function."""

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def forward(self, x: Tensor, attend: Attend, residual: Tensor) -> Tensor:
        context = attend(*map(self._split, self._project(x)))
        return self.output(context.transpose(1, 2).flatten(2), residual)

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values `[B, T, D]`."""
        layers = (self.query, self.key, self.value)
        if not all(layer.plain for layer in layers):
            return [layer(x) for layer in layers]
        tensors = (tensor for layer in layers for tensor in (layer.weight, layer.bias))
        return qkv_linear(x, *tensors, operands=self.query.operands)  # type: ignore[arg-type]

    def _split(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, H, T, d]`."""
        return x.unflatten(-1, (self.head_count, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """residual + W2 gelu(W1 x + b1) + b2 with the exact (erf) GELU."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.expand = Linear(width, inner_width)
        self.project = Linear(inner_width, width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        expand, project = self.expand, self.project
        if not (expand.plain and project.plain):
            return project(gelu(expand(x)), residual)
        assert expand.weight is not None
        assert project.weight is not None
        weights = (expand.weight, expand.bias, project.weight, project.bias)
        return feed_forward(x, *weights, residual, operands=expand.operands)


class Block(nn.Module):
    """A pre-norm transformer block: attention, then feed-forward, each added to its input."""

    def __init__(self, width: int, head_count: int, inner_width: int, epsilon: float) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width, epsilon)
        self.attention = Attention(width, head_count)
        self.feed_forward_norm = LayerNorm(width, epsilon)
        self.feed_forward = FeedForward(width, inner_width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.attention(self.attention_norm(x), attend, x)
        return self.feed_forward(self.feed_forward_norm(x), x)
