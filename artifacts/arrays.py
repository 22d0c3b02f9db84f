"""The arrays of an artifact: little-endian float32, flat, and read-only for good."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import ArtifactError
from artifacts.specs import ParameterSpec

FLOAT32 = np.dtype("<f4")

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def owned_floats(name: str, values: NDArray[Any]) -> Floats:
    """A read-only float32 copy of real numbers, rounded by way of float64.

    Raises TypeError for other types, ArtifactError, code "not-finite", for what is not finite as float32.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be real numbers, got an array of {array.dtype}")
    if array.dtype != np.float32:
        array = array.astype(np.float64, copy=False)
    with np.errstate(over="ignore"):
        floats = array.astype(FLOAT32, order="C", copy=True)
    if not np.isfinite(floats).all():
        raise ArtifactError("not-finite", f"{name} must be finite as float32: found NaN or an infinity")
    return read_only(floats)


def require_count(name: str, array: NDArray[Any], count: int) -> None:
    """Raise ArtifactError, its code `name`, unless the array has the shape `[count]`."""
    if array.shape != (count,):
        raise ArtifactError(name, f"these parameters need {name} of shape ({count},), got {array.shape}")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written, nor be made writeable; nobody else may hold `array` itself."""
    array.flags.writeable = False
    return array[:]


def named_views(parameters: Iterable[ParameterSpec], values: Floats) -> dict[str, Floats]:
    """Views of flat values `[sum of counts]` by parameter name, each in its shape."""
    views, offset = {}, 0
    for parameter in parameters:
        views[parameter.name] = values[offset : offset + parameter.count].reshape(parameter.shape)
        offset += parameter.count
    return views
