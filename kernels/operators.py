"""Operations as torch operators, `torch.ops.riftco.*`: traced by `torch.compile`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

_LIBRARY = torch.library.Library("riftco", "DEF")
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXLA")
_FLOP_FORMULAS: dict[Any, Callable[..., int]] = {}


def define(
    schema: str,
    implementation: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Register an operator for every device and return the handle to call it by.

    schema: as in "gelu(Tensor x, Tensor? bias) -> Tensor". fake: makes outputs of the right shape, dtype and
    device from fake inputs. backward, setup_context: as for `torch.library.register_autograd`, but outputs
    that nothing depends on have the gradient None. flops: counts floating-point operations, from the shapes
    of the arguments and `out_shape`. Implementations run with autocast off; one that has a backward raises
    RuntimeError where forward-mode differentiation would need its derivative.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"riftco::{name}", fake, lib=_LIBRARY)
    handle = getattr(torch.ops.riftco, name)
    for key in _AUTOCAST_KEYS:
        _LIBRARY.impl(name, _without_autocast(handle.default), key)
    if backward is not None and setup_context is not None:
        _LIBRARY.impl(name, _differentiable(handle.default, setup_context, backward), "Autograd")
    if flops is not None:
        _FLOP_FORMULAS[handle] = flops
    return handle.default


def in_shape(y: Tensor, shape: Sequence[int]) -> Tensor:
    """A result in another shape, which autograd does not take for a view: those may not change in place."""
    reshaped: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return reshaped


def flop_counter(**options: Any) -> Any:
    """torch's `FlopCounterMode(**options)`, which counts these operators too."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton: 75 MiB and 0.2 s

    return FlopCounterMode(custom_mapping=_FLOP_FORMULAS, **options)


def _without_autocast(operator: Any) -> Callable[..., Any]:
    """What runs in its place while autocast is on: no implementation expects its own products in bf16."""

    def call(*arguments: Any) -> Any:
        with torch._C._DisableAutocast():
            return operator(*arguments)

    return call


def _differentiable(
    operator: Any, setup_context: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """What autograd runs for the operator. `register_autograd` would do too, at twice the cost of a call."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*arguments)
            ctx.set_materialize_grads(False)
            ctx.argument_count = len(arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            if all(gradient is None for gradient in gradients):
                return (None,) * ctx.argument_count
            return differentiate(ctx, *gradients)

    def call(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(operator, arguments)
        tracked = (isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
        if torch.is_grad_enabled() and any(tracked):  # a node costs half of a small call
            return Node.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return call


def _refuse_tangents(operator: Any, arguments: tuple[Any, ...]) -> None:
    for x in arguments:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{operator}: forward-mode differentiation (jvp) is not supported; use backward or torch's "
                "own operations"
            )
