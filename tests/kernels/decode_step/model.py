"""A small random model by the bundle's names, its forward written out, and pages full of poison."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.decode_step.int8 import Int8Weight
from kernels.nf4 import dequantize_nf4, quantize_nf4

PROJECTIONS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 35
    context: int = 70
    width: int = 24
    heads: int = 3
    blocks: int = 2
    inner: int = 40

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def random_tensors(s: Sizes, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.scale": 1 + draw(s.width), f"{name}.bias": draw(s.width)}

    def linear(name: str, out: int, fan_in: int) -> dict[str, Tensor]:
        return {f"{name}.weight": draw(out, fan_in) * 1.5, f"{name}.bias": draw(out)}

    tensors = {"token_embedding.weight": draw(s.vocabulary, s.width)}
    tensors["position_embedding.weight"] = draw(s.context, s.width)
    for block in (f"blocks.{number}" for number in range(s.blocks)):
        tensors |= norm(f"{block}.attention_norm") | norm(f"{block}.feed_forward_norm")
        for name in PROJECTIONS:
            tensors |= linear(f"{block}.attention.{name}", s.width, s.width)
        tensors |= linear(f"{block}.feed_forward.expand", s.inner, s.width)
        tensors |= linear(f"{block}.feed_forward.project", s.width, s.inner)
    return tensors | norm("final_norm") | linear("language_model_head", s.vocabulary, s.width)


def rounded(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors with linear weights as a kind stores them, as float32."""

    def store(name: str, x: Tensor) -> Tensor:
        if x.ndim == 1 or "embedding" in name or kind == "float32":
            return x
        if kind == "int8":
            return Int8Weight.quantize(x).dequantize()
        return x.bfloat16().float() if kind == "bfloat16" else dequantize_nf4(quantize_nf4(x))

    return {name: store(name, x) for name, x in tensors.items()}


def forward(
    tensors: dict[str, Tensor],
    ids: Tensor,
    s: Sizes,
    dtype: torch.dtype = torch.float64,
    rounding: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Logits `[T, V]` of the whole sequence at once; what goes into a linear layer is rounded."""
    t = {name: x.to(dtype) for name, x in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (s.width,), t[f"{name}.scale"], t[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(rounding(x).to(dtype), t[f"{name}.weight"], t[f"{name}.bias"])

    x = t["token_embedding.weight"][ids] + t["position_embedding.weight"][: len(ids)]
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for block in (f"blocks.{number}" for number in range(s.blocks)):
        a = norm(x, f"{block}.attention_norm")
        q, k, v = (
            linear(a, f"{block}.attention.{name}").view(-1, s.heads, s.head_width).transpose(0, 1)
            for name in PROJECTIONS[:3]
        )
        scores = (q @ k.mT / math.sqrt(s.head_width)).masked_fill(hidden, -math.inf)
        context = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(context, f"{block}.attention.output")
        a = norm(x, f"{block}.feed_forward_norm")
        x = x + linear(
            functional.gelu(linear(a, f"{block}.feed_forward.expand")), f"{block}.feed_forward.project"
        )
    return linear(norm(x, "final_norm"), "language_model_head")


def poisoned_pages(
    s: Sizes, count: int, page: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    shape = (count, s.heads, page, s.head_width)
    keys, values = ([torch.full(shape, math.nan, dtype=dtype) for _ in range(s.blocks)] for _ in range(2))
    return keys, values


def tables(lengths: list[int], page: int, seed: int = 0) -> tuple[Tensor, int]:
    """A page table `[sequences, most pages + 1]`, nonsense where nothing is used, and the pages in all."""
    used = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(lengths), max(used) + 1), -(2**40))
    for row, part in enumerate(order.split(used)):
        table[row, : len(part)] = part
    return table, sum(used)
