"""Adam's step as the contract reads, in torch operations, float64 wherever a device can."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.adam.transaction import Settings, norm_and_clip, require_finite, versions

ROWS, COLUMNS = 16, 256


def step(
    first: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_pages: Sequence[Tensor],
    second_pages: Sequence[Tensor],
    page_counts: Sequence[int],
    settings: Settings,
) -> tuple[float, float]:
    """The gradient's norm and the factor applied to it; `first` is the tensor that chose the device."""
    versions([*parameters, *first_pages, *second_pages])
    norm, clip = norm_and_clip(sum_of_squares(gradients), settings)
    numbers = settings.with_clip(clip)
    changes: list[tuple[Tensor, Tensor]] = []
    at = 0
    for parameter, gradient, pages in zip(parameters, gradients, page_counts, strict=True):
        moments = [list(all_pages[at : at + pages]) for all_pages in (first_pages, second_pages)]
        m, v = (_joined(of_one, parameter) for of_one in moments)
        values, m, v = candidates(parameter.flatten(), gradient.flatten(), m, v, numbers)
        changes.append((parameter, values))
        for of_one, new in zip(moments, (m, v), strict=True):
            changes += zip(of_one, new.split([page.numel() for page in of_one]), strict=True)
        at += pages
    require_finite(all(bool(new.isfinite().all()) for _, new in changes))
    for old, new in changes:
        old.copy_(new.view(old.shape))
    return norm, clip


def _joined(pages: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([page.flatten() for page in pages]) if pages else like.new_empty(0)


def candidates(
    parameter: Tensor, gradient: Tensor, m: Tensor, v: Tensor, settings: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """New float32 values of a parameter and its moments; each operation rounds by itself."""
    clip, beta1, beta2, correction1, correction2, learning_rate, epsilon = settings
    g = _wide(gradient) * clip
    m = _wide(m) * beta1 + g * (1.0 - beta1)
    v = _wide(v) * beta2 + g * (1.0 - beta2) * g
    denominator = (v / correction2).sqrt() + epsilon
    theta = _wide(parameter) - m / correction1 * learning_rate / denominator
    return theta.float(), m.float(), v.float()


def sum_of_squares(gradients: Sequence[Tensor]) -> float:
    """In the order that all implementations share.

    A gradient is cut into chunks of 16 x 256: down the rows of a column, then the columns by halves, then the
    chunks in order.
    """
    chunks = [pad(_wide(g.flatten()).square(), (0, -g.numel() % (ROWS * COLUMNS))) for g in gradients]
    rows = torch.cat(chunks).view(-1, ROWS, COLUMNS)
    sums = rows[:, 0].clone()
    for row in range(1, ROWS):
        sums += rows[:, row]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    total = 0.0
    for value in sums.flatten().tolist():
        total += value
    return total


def _wide(x: Tensor) -> Tensor:
    return x.cpu().double() if x.device.type == "mps" else x.double()  # Metal has no float64
