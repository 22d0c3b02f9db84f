"""A step in three parts: measure, decide, apply. Nothing is written unless the whole step is allowed.

Whether every new value will be finite follows, in every sane step, from the largest values there are, which
costs one reading of memory. Only where these bounds do not settle it are the new values themselves computed
and looked at before they are computed again and stored.
"""

import math
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from torch import Tensor

_LARGEST = 3.4e38  # less than float32's largest value
_SLACK = 1.001  # more than all rounding of the bounds

_version = attrgetter("_version")


class NonFiniteUpdateError(ValueError):
    """A step that would not leave everything finite, and was not taken."""


class Settings(NamedTuple):
    """The numbers of a step; the powers include it."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    maximum_gradient_norm: float
    beta1_power: float
    beta2_power: float

    def with_clip(self, clip: float) -> tuple[float, ...]:
        """As the kernels take them."""
        corrections = (1.0 - self.beta1_power, 1.0 - self.beta2_power)
        return clip, self.beta1, self.beta2, *corrections, self.learning_rate, self.epsilon


class Arrays(Protocol):
    """All tensors of a step, on some device."""

    def measure(self) -> tuple[float, Sequence[int]]:
        """The sum of the squares of all gradients, and the largest bit patterns.

        Those of parameters and first moments without their signs, and of second moments with it.
        """

    def finite(self, settings: tuple[float, ...]) -> bool:
        """Whether all new values are finite."""

    def apply(self, settings: tuple[float, ...]) -> None:
        """Store the new values."""


def versions(written: Sequence[Tensor]) -> list[int]:
    """How often each has been written, as torch counts; ValueError for tensors that it does not count for."""
    try:
        return [*map(_version, written)]
    except RuntimeError as error:
        raise ValueError(
            "there is a parameter or moment made in inference mode, whose writes torch does not count: clone "
            "it outside"
        ) from error


def run(arrays: Arrays, settings: Settings) -> tuple[float, float]:
    """The gradient's norm and the factor applied to it; ValueError, and nothing written, if not allowed."""
    squares, largest = arrays.measure()
    norm, clip = norm_and_clip(squares, settings)
    numbers = settings.with_clip(clip)
    if not certainly_finite([*map(_magnitude, largest), norm * clip], settings):
        require_finite(arrays.finite(numbers))
    arrays.apply(numbers)
    return norm, clip


def norm_and_clip(squares: float, settings: Settings) -> tuple[float, float]:
    """The norm, and what brings it down to the largest allowed; ValueError if it is not finite."""
    norm = math.sqrt(squares)
    if not math.isfinite(norm):
        raise NonFiniteUpdateError(
            f"the gradient norm is {norm}; nothing was updated. Lower the learning rate"
        )
    largest = settings.maximum_gradient_norm
    return norm, largest / norm if norm > largest else 1.0


def require_finite(finite: bool) -> None:
    """ValueError if a new value is not."""
    if not finite:
        raise NonFiniteUpdateError(
            "an updated value is not finite; nothing was updated. Lower the learning rate"
        )


def certainly_finite(bounds: Sequence[float], settings: Settings) -> bool:
    """True only if no new value can overflow float32.

    bounds: of the magnitudes of parameters, first moments, second moments and clipped gradients.

    New moments are means of the old one and the gradient or its square; an update is at most
    lr m / (1 - b1^t) / epsilon, as a square root is not negative.
    """
    parameter, first_moment, second_moment, gradient = bounds
    first = max(first_moment, gradient) * _SLACK
    second = max(second_moment, gradient * gradient) * _SLACK
    update = settings.learning_rate * first / (1.0 - settings.beta1_power) / settings.epsilon
    return first < _LARGEST and second < _LARGEST and parameter + update * _SLACK < _LARGEST


def _magnitude(pattern: int) -> float:
    """The float32 of that bit pattern, infinite for what is not finite or negative."""
    value: float = struct.unpack("<f", struct.pack("<I", pattern))[0]
    return value if 0 <= pattern < 0x7F800000 else math.inf
