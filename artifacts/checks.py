"""Checks that the values of an artifact share; messages name the thing, the value and what it must be."""

import math
import struct
from typing import Any


def require_keys(what: str, value: Any, keys: set[str]) -> None:
    """Raise TypeError unless `value` is an object, ValueError unless it has exactly the keys."""
    if not isinstance(value, dict):
        raise TypeError(f"{what} must be an object, got {type(value).__name__}")
    if value.keys() != keys:
        raise ValueError(f"{what} must have exactly the keys {sorted(keys)}, got {sorted(value)}")


def require_integer(what: str, value: Any, lowest: int, highest: int | None) -> None:
    """Raise TypeError unless `value` is an int (bool is none), ValueError unless it is within the bounds."""
    if type(value) is not int:
        raise TypeError(f"{what} must be an integer, got {value!r}")
    if value < lowest or (highest is not None and value > highest):
        bounds = f"at least {lowest}" if highest is None else f"between {lowest} and {highest}"
        raise ValueError(f"{what} must be {bounds}, got {value}")


def require_choice(what: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of the texts."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {value!r}")


def positive_float32(what: str, value: Any) -> float:
    """The number rounded to float32; TypeError for other types, ValueError unless positive and finite."""
    if type(value) not in (int, float):
        raise TypeError(f"{what} must be a number, got {value!r}")
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        rounded = math.inf
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"{what} must be a positive finite float32, got {value!r}")
    return rounded
