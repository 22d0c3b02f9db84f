"""Linear layers and the feed-forward in torch: the definition, for every device and dtype.

"half" multiplies in bfloat16 with sums in float32: operands are rounded to it, and results where units do so.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gelu.reference import backward as gelu_backward
from kernels.gelu.reference import forward as gelu_forward
from kernels.operands import Operands, in_bytes

_AVX512_BF16 = torch.cpu._is_avx512_bf16_supported()
_AMX = torch.cpu._is_amx_tile_supported()


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, operands: Operands
) -> Tensor:
    """x W^T + bias + residual, a new contiguous tensor; x `[n, in]`."""
    if operands == "full":
        y = functional.linear(x, weight, bias)
    else:
        y = product(x, weight.t(), operands)
        y = y if bias is None else y.add_(bias)
    return y if residual is None else y.add_(residual)


def backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    needed: list[bool],
    operands: Operands,
    total: Tensor | None = None,
) -> list[Tensor]:
    """The needed gradients of x, weight and bias; that of x is added to `total`, in place, if it is given."""
    for_x, for_weight, for_bias = needed
    gradients = []
    if for_x:
        of_x = product(gradient, weight, operands)
        gradients.append(of_x if total is None else total.add_(of_x))
    if for_weight:
        gradients.append(product(gradient.t(), x, operands))
    if for_bias:
        gradients.append(gradient.sum(0))
    return gradients


def feed_forward(
    x: Tensor,
    expand: Tensor,
    expand_bias: Tensor,
    project: Tensor,
    project_bias: Tensor,
    residual: Tensor,
    operands: Operands,
) -> tuple[Tensor, Tensor]:
    """residual + W2 gelu(z) + b2, and z = W1 x + b1."""
    z = forward(x, expand, expand_bias, None, operands)
    return forward(gelu_forward(z, None), project, project_bias, residual, operands), z


def feed_forward_backward(
    gradient: Tensor,
    x: Tensor,
    z: Tensor,
    expand: Tensor,
    project: Tensor,
    needed: list[bool],
    operands: Operands,
) -> list[Tensor]:
    """The needed gradients of x, W1, b1, W2 and b2."""
    for_x, for_expand, for_expand_bias, for_project, for_project_bias = needed
    dz = product(gradient, project, operands)
    dz, _ = gelu_backward(dz, z, None)
    inner = backward(dz, x, expand, [for_x, for_expand, for_expand_bias], operands)
    h = gelu_forward(z, None) if for_project else z
    return inner + backward(gradient, h, project, [False, for_project, for_project_bias], operands)


def product(a: Tensor, b: Tensor, operands: Operands) -> Tensor:
    """a b; of bfloat16 operands, where CPUs with instructions for them round the result too, or of bytes."""
    if operands == "full":
        return a @ b
    if operands == "int8":
        return in_bytes(a, 1) @ in_bytes(b, 0)
    if a.is_cuda:
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32).to(a.dtype)
    if multiplies_bfloat16(a.device):
        return (a.bfloat16() @ b.bfloat16()).to(a.dtype)
    return rounded(a) @ rounded(b)


def rounded(x: Tensor) -> Tensor:
    """The values of bfloat16 in x's own dtype."""
    return x.bfloat16().to(x.dtype)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether torch's bfloat16 products are faster there than its float32 ones."""
    return device.type != "cpu" or _AVX512_BF16


def has_matrix_units(device: torch.device) -> bool:
    """Whether bfloat16 products are faster there than any others: on no CPU but those with AMX."""
    return device.type != "cpu" or _AMX
