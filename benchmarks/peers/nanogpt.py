"""A minimal GPT loop as many write it: torch modules, fused attention, fused AdamW, autocast, compile."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.work import LEARNING_RATE, VOCABULARY, Size, batches


class Block(nn.Module):
    """Pre-norm: attention, then a feed-forward with GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(context.transpose(1, 2).reshape(batch, length, width))
        return x + self.project(functional.gelu(self.expand(self.norms[1](x))))


class Gpt(nn.Module):
    """Token ids and targets to the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.blocks)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def step(size: Size, method: str, variant: str) -> Callable[[], None]:
    """`variant`: fp32 or bf16 (autocast), and `compiled`."""
    if method != "full":
        raise ValueError(f"it has no {method}")
    model = Gpt(size)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if "compiled" in variant else model
    source = batches(size)

    def take() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in variant):
            loss = forward(*next(source))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take
