"""Operations as torch operators, `torch.ops.riftco.*`: traced by `torch.compile`, counted by profilers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_LIBRARY = torch.library.Library("riftco", "DEF")


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
    device from fake inputs. backward, setup_context: as for `torch.library.register_autograd`. flops: counts
    floating-point operations, from the shapes of the arguments and `out_shape`.
    """
    name = schema.split("(", 1)[0]
    qualified = f"riftco::{name}"
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    handle = getattr(torch.ops.riftco, name)
    if flops is not None:
        register_flop_formula(handle)(flops)
    return handle.default
