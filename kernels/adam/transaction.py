"""A step in three parts: measure, decide, apply. Nothing is written unless the whole step is allowed.

Whether every new value will be finite follows, in every sane step, from bounds of the values there are, and
so do bounds of the new ones. Only where they do not settle it are the new values themselves computed and
looked at before they are computed again and stored.
"""

import math
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from torch import Tensor

_LARGEST = 3.4e38  # less than float32's largest value
_SLACK = 1.000001  # more than all rounding of the bounds

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


class Bounds(NamedTuple):
    """Of the values' magnitudes; infinite for what is not finite, or negative where it may not be."""

    parameter: float
    first_moment: float
    second_moment: float

    @classmethod
    def of_patterns(cls, largest: Sequence[int]) -> "Bounds":
        """From the largest float32 bit patterns, without their signs but for second moments."""
        return cls(*map(_magnitude, largest))

    def after(self, gradient: float, settings: Settings) -> "Bounds":
        """Those of the new values, for clipped gradients of at most that magnitude.

        New moments are means of the old one and the gradient or its square; an update is at most
        lr m / (1 - b1^t) / epsilon, as a square root is not negative.
        """
        first = max(self.first_moment, gradient) * _SLACK
        second = max(self.second_moment, gradient * gradient) * _SLACK
        update = settings.learning_rate * first / (1.0 - settings.beta1_power) / settings.epsilon
        return Bounds((self.parameter + update) * _SLACK, first, second)

    @property
    def finite(self) -> bool:
        """Whether no such value overflows float32."""
        return max(self) < _LARGEST


class Arrays(Protocol):
    """All tensors of a step, on some device."""

    def measure(self) -> tuple[float, Bounds]:
        """The sum of the squares of all gradients, and bounds of parameters and moments."""

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


def run(arrays: Arrays, settings: Settings) -> tuple[float, float, Bounds]:
    """The gradient's norm, the factor applied to it, and bounds of what is stored, if they settle it.

    ValueError, and nothing written, for a step that is not allowed.
    """
    squares, bounds = arrays.measure()
    norm, clip = norm_and_clip(squares, settings)
    numbers = settings.with_clip(clip)
    after = bounds.after(norm * clip, settings)
    if not after.finite:
        require_finite(arrays.finite(numbers))
    arrays.apply(numbers)
    return norm, clip, after


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


def _magnitude(pattern: int) -> float:
    """The float32 of that bit pattern, infinite for what is not finite or negative."""
    value: float = struct.unpack("<f", struct.pack("<I", pattern))[0]
    return value if 0 <= pattern < 0x7F800000 else math.inf
