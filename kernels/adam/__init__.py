"""Adam's step (Kingma & Ba 2014) by the contract: float64 arithmetic, global clipping, all or nothing."""

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kernels.adam import cpu, reference
from kernels.adam.transaction import NonFiniteUpdateError, Settings
from kernels.dispatch import Operation
from kernels.operators import define

__all__ = ["NonFiniteUpdateError", "adam_step"]

_dtype, _device, _is_cpu = map(attrgetter, ("dtype", "device", "is_cpu"))

Moments = Sequence[Tensor | Sequence[Tensor]]


def adam_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Moments,
    second_moments: Moments,
    *,
    beta1_power: float,
    beta2_power: float,
    learning_rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    maximum_gradient_norm: float = 1.0,
) -> tuple[float, float]:
    """Update float32 parameters and moments in place; the gradient's norm, and the factor c applied to it.

    With c = min(1, maximum_gradient_norm / norm) and g = c gradient, in float64, rounded once when stored:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        parameter -= lr (m / (1 - beta1_power)) / (sqrt(v / (1 - beta2_power)) + epsilon)

    beta1_power and beta2_power are b1^t and b2^t of this step, t from 1. A parameter's moments are one tensor
    of as many elements, or a list of pages that have as many together; the result is the same bit for bit, on
    any number of threads. ValueError, and nothing changed, if the norm or any new value is not finite.

    On a CPU a step trusts the one before on how large parameters and moments are, unless torch's version
    counters or the addresses say that they were changed meanwhile. Writes that torch does not count, through
    `.data`, `.numpy()` or another process, must keep them finite, second moments not negative: such a step
    may be taken and store what is not finite.
    """
    settings = Settings(learning_rate, beta1, beta2, epsilon, maximum_gradient_norm, beta1_power, beta2_power)
    _require_settings(settings)
    pages = [_pages(moments) for moments in (first_moments, second_moments)]
    _require_shapes(parameters, gradients, *pages)
    flat = [[*chain.from_iterable(of_all)] for of_all in pages]
    _require_float32([*parameters, *gradients, *flat[0], *flat[1]])
    counts = [*map(len, pages[0])]
    with torch.no_grad():
        norm, clip = _operator(list(parameters), list(gradients), *flat, counts, list(settings)).tolist()
    return norm, clip


def _pages(moments: Moments) -> list[Sequence[Tensor]]:
    return [(of_one,) if isinstance(of_one, Tensor) else of_one for of_one in moments]


def _require_settings(settings: Settings) -> None:
    for name, value in settings._asdict().items():
        fraction = name.startswith("beta")
        above = value > 0 or (value == 0 and name.endswith("_power"))  # a power may have underflowed
        if not (math.isfinite(value) and above and (value < 1 or not fraction)):
            range_ = "between 0 and 1" if fraction else "finite and above 0"
            raise ValueError(f"{name} must be {range_}, got {value}")


def _require_float32(tensors: list[Tensor]) -> None:
    device = tensors[0].device
    together = all(map(_is_cpu, tensors)) or {*map(_device, tensors)} == {device}
    if not together or {*map(_dtype, tensors)} != {torch.float32}:
        wrong = next(t for t in tensors if t.dtype != torch.float32 or t.device != device)
        raise ValueError(
            f"there is a tensor of {wrong.dtype} on {wrong.device}: adam_step takes float32 on {device}"
        )


def _require_shapes(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: list[Sequence[Tensor]],
    seconds: list[Sequence[Tensor]],
) -> None:
    lengths = [*map(len, (parameters, gradients, firsts, seconds))]
    if not parameters or len(set(lengths)) > 1:
        raise ValueError(f"parameters, gradients and moments must be equally many, at least 1, got {lengths}")
    sizes, same = [*map(Tensor.numel, parameters)], all(map(Tensor.is_same_size, gradients, parameters))
    whole = {*map(len, firsts), *map(len, seconds)} == {1}
    moments = ([*map(Tensor.numel, chain.from_iterable(of_all))] for of_all in (firsts, seconds))
    if same and whole and all(of_all == sizes for of_all in moments):
        return  # nothing is wrong, and so there is nothing to look for one by one
    for i, gradient in enumerate(gradients):
        if not gradient.is_same_size(parameters[i]):
            raise ValueError(
                f"gradient {i} is {list(gradient.shape)}, its parameter {list(parameters[i].shape)}: "
                "they must be equal"
            )
        first, second = [*map(Tensor.numel, firsts[i])], [*map(Tensor.numel, seconds[i])]
        if first != second or sum(first) != parameters[i].numel():
            raise ValueError(
                f"moments {i} have pages of {first} and {second} elements: "
                f"both need the same pages, {parameters[i].numel()} elements in all"
            )


def _triton(*arguments: Any) -> Any:
    return import_module("kernels.adam.triton_adam").step(*arguments)  # Triton is optional and slow to import


_step = Operation("adam", torch=reference.step, native=cpu.step, triton=_triton)


def _implementation(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_pages: list[Tensor],
    second_pages: list[Tensor],
    page_counts: list[int],
    settings: list[float],
) -> Tensor:
    arguments = (parameters, gradients, first_pages, second_pages, page_counts, Settings(*settings))
    return torch.tensor(_step(parameters[0], *arguments), dtype=torch.float64, device="cpu")


_operator = define(
    "adam_step(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] first_pages, "
    "Tensor(c!)[] second_pages, int[] page_counts, float[] settings) -> Tensor",
    _implementation,
    fake=lambda *_: torch.empty(2, dtype=torch.float64, device="cpu"),
)
