"""Low-rank adapters on linear layers (Hu et al. 2021): attach with exact initial values, merge once."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from riftco.config import LoraConfig
from riftco.model.initialization import UniformStream, xavier_bound
from riftco.model.layers import Linear, Weight


def attach(linears: Mapping[str, Linear], config: LoraConfig) -> None:
    """Give each linear `[out, in]` an A `[rank, in]` (Xavier uniform) and a B `[out, rank]` (zeros)."""
    for name, linear in linears.items():
        if config.rank > min(linear.weight.shape):
            raise ValueError(
                f"lora rank {config.rank} exceeds {min(linear.weight.shape)}, the least side of {name}"
            )
    stream = UniformStream(config.random_seed)
    for linear in linears.values():
        fan_out, fan_in = linear.weight.shape
        linear.lora_a, linear.lora_b = Weight(config.rank, fan_in), Weight(fan_out, config.rank)
        stream.fill(linear.lora_a.weight, xavier_bound(fan_in, config.rank))
        nn.init.zeros_(linear.lora_b.weight)
        linear.lora_a.to(linear.weight.device)
        linear.lora_b.to(linear.weight.device)
        linear.lora_scale = float(np.float32(config.alpha) / np.float32(config.rank))


@torch.no_grad()
def merge(linears: Iterable[Linear]) -> None:
    """W <- W + scale * (B A) wherever there is an adapter, which is then removed; all or nothing.

    ValueError, and nothing changed, when a merged weight would not be finite.
    """
    merged: list[tuple[Linear, Tensor]] = []
    for linear in linears:
        if linear.lora_a is not None and linear.lora_b is not None:
            delta = linear.lora_b.weight @ linear.lora_a.weight
            merged.append((linear, linear.weight + linear.lora_scale * delta))
    if not all(bool(weight.isfinite().all()) for _, weight in merged):
        raise ValueError("merging LoRA would give weights that are not finite; nothing was changed")
    for linear, weight in merged:
        linear.weight.copy_(weight)
        linear.lora_a = linear.lora_b = None
