"""Cross-entropy written out in torch: the definition, for every device and dtype.

`mask` is bool `[N]` with the rows that count, or None for all. A target outside the vocabulary gives NaN.
"""

import torch
from torch import Tensor


def divisor(targets: Tensor, mask: Tensor | None, mean: bool) -> Tensor | int:
    """What the summed losses are divided by: the number of rows that count, at least 1; 1 for a sum."""
    if not mean:
        return 1
    return max(targets.numel(), 1) if mask is None else _wide(mask.sum().clamp(min=1))


def forward(logits: Tensor, targets: Tensor, mask: Tensor | None, mean: bool) -> tuple[Tensor, Tensor]:
    """The loss, and each row's maximum and sum of exponentials `[N, 2]`; float32, or float64 for float64."""
    losses, statistics = _losses(logits, targets, mask)
    kind = statistics_dtype(logits)
    return (losses.sum() / divisor(targets, mask, mean)).to(kind), statistics.to(kind)


def backward(
    upstream: Tensor, logits: Tensor, targets: Tensor, mask: Tensor | None, statistics: Tensor, mean: bool
) -> Tensor:
    """The gradient of the logits, like them."""
    coefficient = upstream / divisor(targets, mask, mean)
    return (_gradient(logits, targets, mask, statistics) * coefficient).to(logits.dtype)


def in_place(
    logits: Tensor, targets: Tensor, mask: Tensor | None, coefficient: Tensor | float, differentiate: bool
) -> Tensor:
    """The loss of each row; with `differentiate` the logits become their gradients times the coefficient."""
    losses, statistics = _losses(logits, targets, mask)
    if differentiate:
        logits.copy_(_gradient(logits, targets, mask, statistics) * coefficient)
    return losses


def statistics_dtype(logits: Tensor) -> torch.dtype:
    """Of the loss and the statistics: float32, or float64 for float64."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _losses(logits: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """log(total) - (logit of the target - largest) of each row, and (largest, total)."""
    wide = _wide(logits)
    largest = wide.amax(-1, keepdim=True)
    total = torch.exp(wide - largest).sum(-1, keepdim=True)
    column = _inside(targets, logits)
    losses = total.log() - (wide.gather(-1, column) - largest)
    losses = torch.where(column == targets[:, None], losses, torch.nan)
    if mask is not None:
        losses = losses.masked_fill(~mask[:, None], 0.0)
    return losses.squeeze(-1), torch.cat([largest, total], -1)


def _gradient(logits: Tensor, targets: Tensor, mask: Tensor | None, statistics: Tensor) -> Tensor:
    """softmax - onehot."""
    largest, total = _wide(statistics).split(1, -1)
    column = _inside(targets, logits)
    gradient = torch.exp(_wide(logits).contiguous() - largest) / total
    gradient.scatter_add_(-1, column, gradient.new_full((), -1.0).expand(column.shape))
    gradient = gradient.masked_fill(column != targets[:, None], torch.nan)
    return gradient if mask is None else gradient.masked_fill(~mask[:, None], 0.0)


def _inside(targets: Tensor, logits: Tensor) -> Tensor:
    return targets.clamp(0, logits.shape[-1] - 1)[:, None]


def _wide(x: Tensor) -> Tensor:
    """In float64 where the device has it."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)
