"""The sizes that are trained, and the random batches all contenders see."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 4096
RANK = 8
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """A model and its batch; the feed-forward is four times as wide."""

    width: int
    blocks: int
    heads: int
    context: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.width}x{self.blocks}x{self.context}"

    @property
    def tokens(self) -> int:
        """Trained in one step."""
        return self.batch * self.context

    def multiply_adds(self, method: str) -> int:
        """Of the matrix products of a step: forward, for the inputs, and for the weights that are trained.

        Attention's own products and those of adapters are left out: this is what no arrangement saves.
        """
        blocks = 12 * self.width**2 * self.blocks
        head = self.width * VOCABULARY
        return self.tokens * (blocks + head) * (3 if method == "full" else 2)


SIZES = {
    size.name: size for size in (Size(64, 2, 2, 64, 8), Size(256, 6, 8, 256, 8), Size(768, 12, 12, 1024, 1))
}


def batches(size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 `[batch, context]`, without end."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (size.batch, size.context + 1), generator=generator) for _ in range(4)]
    while True:
        for row in rows:
            yield row[:, :-1].contiguous(), row[:, 1:].contiguous()
