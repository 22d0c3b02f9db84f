"""From logits to the next token id: the highest, or a draw from the tempered softmax.

The draw is a contract: Python's Mersenne Twister, one `random()` per token, binary64 weights added by
`math.fsum`, so that a seed gives the same tokens on every machine.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from numbers import Real
from random import Random

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Logits = Sequence[float] | NDArray[np.floating] | Tensor
Sampler = Callable[[Logits], int]


class GreedySampler:
    """The highest logit; the lowest id among equals."""

    def __call__(self, logits: Logits) -> int:
        """A token id for finite logits `[V]`; see `checked_logits` for errors."""
        return int(np.argmax(checked_logits(logits)))


class TemperatureSampler:
    """A draw from softmax(logits / temperature), among the `top_k` highest if given.

    The generator is private and goes on from call to call. TypeError for a bool or another type, ValueError
    for a temperature that is not finite and positive, a top_k below 1 or a seed outside 0...2^64 - 1.
    """

    def __init__(self, temperature: float = 1.0, *, top_k: int | None = None, seed: int = 0) -> None:
        self.temperature = checked_temperature(temperature)
        if self.temperature == 0:
            raise ValueError("temperature must be greater than zero; use GreedySampler for zero")
        if top_k is not None:
            _require_integer("top_k", top_k)
            if top_k < 1:
                raise ValueError("top_k must be at least 1")
        _require_integer("seed", seed)
        if seed < 0:
            raise ValueError("seed must be at least 0")
        if seed >= 2**64:
            raise ValueError("seed must be at most 2**64 - 1")
        self.top_k = top_k
        self.seed = seed
        self._random = Random(seed)

    def __call__(self, logits: Logits) -> int:
        """A token id for finite logits `[V]`; ValueError when top_k exceeds V."""
        values = checked_logits(logits)
        if self.top_k is not None and self.top_k > len(values):
            raise ValueError("top_k must not exceed the number of logits")
        order = np.argsort(-values, kind="stable")[: self.top_k]  # by (-logit, id)
        kept = values[order]
        with np.errstate(over="ignore"):  # a tiny temperature gives -inf, which is weight 0
            exponents = (kept - kept[0]) / self.temperature
        # math.exp rather than numpy's: the contract's last bit is the C library's.
        weights = [math.exp(exponent) for exponent in exponents.tolist()]
        threshold = self._random.random() * math.fsum(weights)
        for position, cumulative in enumerate(accumulate(weights)):
            if threshold < cumulative:
                return int(order[position])
        return int(order[-1])


def checked_logits(logits: Logits) -> NDArray[np.float64]:
    """Logits as a non-empty finite float64 vector.

    TypeError for bool entries, ValueError for none, more than one dimension or an entry that is not a finite
    real number.
    """
    array = _as_array(logits)
    if array.dtype == np.bool_:
        raise TypeError("logits must be real numbers, not bool")
    if array.ndim != 1 or not len(array):
        raise ValueError(f"logits must be a non-empty vector, got shape {list(array.shape)}")
    values = array.astype(np.float64, copy=False)
    if not np.isfinite(values).all():
        raise ValueError("logits must be finite")
    return values


def checked_temperature(temperature: float) -> float:
    """The temperature as a float; TypeError unless a real number, ValueError unless finite and >= 0."""
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError("temperature must be a real number")
    try:
        value = float(temperature)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError("temperature must be finite")
    if value < 0:
        raise ValueError("temperature must not be negative")
    return value


def _as_array(logits: Logits) -> NDArray[np.generic]:
    if isinstance(logits, Tensor):
        return logits.detach().cpu().numpy()
    if isinstance(logits, np.ndarray):
        return logits
    entries = list(logits)
    if any(isinstance(entry, bool | np.bool_) for entry in entries):
        raise TypeError("logits must be real numbers, not bool")
    if not all(isinstance(entry, Real) for entry in entries):
        raise ValueError("logits must be finite real numbers")
    try:
        return np.array([float(entry) for entry in entries])
    except OverflowError as error:
        raise ValueError("logits must be finite") from error


def _require_integer(name: str, value: int) -> None:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not bool")
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an integer")
