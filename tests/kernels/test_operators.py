"""What holds for every operator: what torch's modes and defaults do to it."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels import (
    cross_entropy,
    dequantize_nf4,
    feed_forward,
    flash_attention,
    gelu,
    greedy,
    layer_norm,
    linear,
    linear_cross_entropy,
    lora_linear,
    nf4_linear,
    paged_attention,
    quantize_nf4,
    sample,
)
from tests.kernels.cases import running

SIZE = 40
SQUARE, VECTOR, TARGETS = torch.randn(SIZE, SIZE) / 6, torch.randn(SIZE), torch.arange(SIZE)
LOGITS, UNIFORMS = torch.randn(3, SIZE), torch.rand(3, dtype=torch.float64)
PACKED = quantize_nf4(SQUARE)
PAGES = torch.randn(4, 2, 16, 8)
FEW_ADAPTED = (torch.randn(4, SIZE), torch.randn(SIZE, 4))  # a rank whose products torch makes

DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: gelu(x, VECTOR),
    "layer_norm": lambda x: layer_norm(x, VECTOR, VECTOR, 1e-5),
    "linear": lambda x: linear(x, SQUARE, VECTOR),
    "feed_forward": lambda x: feed_forward(x, SQUARE, VECTOR, SQUARE, VECTOR, x),
    "lora_linear": lambda x: lora_linear(x, SQUARE, VECTOR, *FEW_ADAPTED, 2.0),
    "lora_linear_nf4": lambda x: lora_linear(x, PACKED, VECTOR, *FEW_ADAPTED, 2.0),
    "nf4_linear": lambda x: nf4_linear(x, PACKED, VECTOR),
    "cross_entropy": lambda x: cross_entropy(x, TARGETS),
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, SQUARE, VECTOR, TARGETS),
    "flash_attention": lambda x: flash_attention(*[x.view(1, 2, 20, SIZE)] * 3),
}
WITHOUT_GRADIENT: dict[str, Callable[[], object]] = {
    "dequantize_nf4": lambda: dequantize_nf4(PACKED),
    "sample": lambda: sample(LOGITS, uniforms=UNIFORMS),
    "greedy": lambda: greedy(LOGITS),
    "paged_attention": lambda: paged_attention(
        PAGES[:1, :, :4], PAGES, PAGES, TARGETS[:2].view(1, 2), TARGETS[20:21]
    ),
}
ALL = {name: lambda call=call: call(SQUARE) for name, call in DIFFERENTIABLE.items()} | WITHOUT_GRADIENT


def test_importing_the_package_does_not_import_triton() -> None:
    """It is 75 MiB and 0.2 s that nobody needs on a CPU; `torch.utils.flop_counter` imports it too."""
    program = "import sys, kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_autocast_changes_nothing(name: str, implementation: str) -> None:
    results = []
    for enabled in (False, True):
        x = SQUARE.clone().requires_grad_()
        with running(implementation), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = DIFFERENTIABLE[name](x)
            results.append((y, *torch.autograd.grad(y.sum(), x)))
    for plain, cast in zip(*results, strict=True):
        assert plain.dtype == cast.dtype
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("name", ALL)
def test_torchs_default_dtype_and_device_change_nothing(name: str, implementation: str) -> None:
    before = torch.get_default_dtype()
    with running(implementation):
        expected = ALL[name]()
        try:
            torch.set_default_dtype(torch.float64)
            with torch.device("meta"):
                found = ALL[name]()
        finally:
            torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("tracked", [False, True])
def test_forward_mode_is_refused_by_name(name: str, tracked: bool) -> None:
    call, x = DIFFERENTIABLE[name], SQUARE.clone().requires_grad_(tracked)
    with forward_ad.dual_level():
        call(x.detach())  # what has no tangent is computed
        with pytest.raises(RuntimeError, match=rf"riftco\.{name}\.default: forward-mode"):
            call(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(call, (SQUARE,), (SQUARE,))
