"""Layer norm written out in torch: the definition, for every device and dtype."""

import torch
from torch import Tensor


def forward(
    x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normed rows, x + residual (empty without one), and the means and 1 / sqrt(variance + epsilon).

    Computed in float32, or float64 for float64; the statistics keep that dtype and have shape `[R]`. The
    norm is that of x + residual as rounded to the dtype of x.
    """
    x = x.contiguous()  # so that the results are
    total = x if residual is None else x + residual.contiguous()
    wide = _wide(total)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon)
    normed = (centred * rstd * scale.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)
    return normed, x.new_empty(0) if residual is None else total, mean.flatten(), rstd.flatten()


def backward(
    gradient: Tensor,
    sum_gradient: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the summed rows, the scale and the bias from those of both results; `total` was normed."""
    x = _wide(total.contiguous())
    g = gradient.to(x.dtype).contiguous()
    shape = (*x.shape[:-1], 1)
    normed = (x - mean.view(shape)) * rstd.view(shape)
    scaled = g * scale.to(x.dtype)
    dx = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    dx = dx * rstd.view(shape)
    if sum_gradient is not None:
        dx = dx + sum_gradient.to(x.dtype).contiguous()
    width = x.shape[-1]
    dscale, dbias = (part.reshape(-1, width).sum(0) for part in (g * normed, g))
    return dx.to(total.dtype), dscale.to(scale.dtype), dbias.to(bias.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
