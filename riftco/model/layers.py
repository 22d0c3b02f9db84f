"""The parts of a block: embedding, norm, linear with an optional low-rank adapter, attention, feed-forward.

B batch, T time, n new tokens, D model width, H heads, d = D / H, F feed-forward width. Everything is float32.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import gelu

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


class Linear(Weight):
    """x W^T + b, plus scale * ((x A^T) B^T) once an adapter is attached; W is `[out, in]`."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_out, fan_in)
        self.bias = nn.Parameter(torch.zeros(fan_out))
        self.lora_a: Weight | None = None
        self.lora_b: Weight | None = None
        self.lora_scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        low_rank = functional.linear(functional.linear(x, self.lora_a.weight), self.lora_b.weight)
        return y + self.lora_scale * low_rank


class Attention(nn.Module):
    """Separate query, key, value and output projections around an attention function."""

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        context = attend(*(self._split(project(x)) for project in (self.query, self.key, self.value)))
        return self.output(context.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, H, T, d]`."""
        return x.unflatten(-1, (self.head_count, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """W2 gelu(W1 x + b1) + b2 with the exact (erf) GELU."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.expand = Linear(width, inner_width)
        self.project = Linear(inner_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(gelu(self.expand(x)))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then feed-forward, each added to its input."""

    def __init__(self, width: int, head_count: int, inner_width: int, epsilon: float) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width, epsilon)
        self.attention = Attention(width, head_count)
        self.feed_forward_norm = LayerNorm(width, epsilon)
        self.feed_forward = FeedForward(width, inner_width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attend)
        return x + self.feed_forward(self.feed_forward_norm(x))
