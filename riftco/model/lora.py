"""Low-rank adapters on linear layers (Hu et al. 2021): attach with exact initial values, merge once."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from kernels import dequantize_nf4
from riftco.config import LoraConfig
from riftco.model.initialization import UniformStream, xavier_bound
from riftco.model.layers import Linear, Weight


def attach(linears: Mapping[str, Linear], config: LoraConfig) -> None:
    """Give each linear `[out, in]` an A `[rank, in]` (Xavier uniform) and a B `[out, rank]` (zeros)."""
    for name, linear in linears.items():
        least = min(linear.fan_in, linear.fan_out)
        if config.rank > least:
            raise ValueError(f"lora rank {config.rank} exceeds {least}, the least side of {name}")
    stream = UniformStream(config.random_seed)
    for linear in linears.values():
        linear.lora_a = Weight(config.rank, linear.fan_in)
        linear.lora_b = Weight(linear.fan_out, config.rank)
        stream.fill(linear.lora_a.weight, xavier_bound(linear.fan_in, config.rank))
        nn.init.zeros_(linear.lora_b.weight)
        linear.lora_a.to(linear.bias.device)
        linear.lora_b.to(linear.bias.device)
        linear.lora_scale = float(np.float32(config.alpha) / np.float32(config.rank))


@torch.no_grad()
def merge(linears: Mapping[str, Linear]) -> None:
    """W <- W + scale * (B A) wherever there is an adapter, which is then removed; all or nothing.

    A packed W becomes the float32 matrix that the adapter was trained on, with an adapter or without.
    ValueError, naming the projection, and nothing changed, when a merged weight would not be finite.
    """
    changed = {
        n: linear for n, linear in linears.items() if linear.packed is not None or linear.lora_a is not None
    }
    merged = {name: _merged(linear) for name, linear in changed.items()}
    for name, weight in merged.items():
        if not bool(weight.isfinite().all()):
            raise ValueError(f"merging LoRA would make {name}.weight not finite; nothing was changed")
    for name, linear in changed.items():
        if linear.weight is None:
            linear.weight, linear.packed = nn.Parameter(merged[name]), None
        else:
            linear.weight.copy_(merged[name])
        linear.lora_a = linear.lora_b = None


def _merged(linear: Linear) -> Tensor:
    base = linear.weight if linear.packed is None else dequantize_nf4(linear.packed)
    assert base is not None
    if linear.lora_a is None or linear.lora_b is None:
        return base
    return base + linear.lora_scale * (linear.lora_b.weight @ linear.lora_a.weight)
