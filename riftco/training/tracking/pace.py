"""How fast a run is: trained tokens per second, and that as a fraction of what the matrix units can do.

The limit is measured on the machine at hand, at the start, in the precisions that the run may use: a
specification sheet knows neither the thread count nor who else is at work. Only tokens that count in the loss
are counted, so padding, the optimiser and everything between two steps lower the fraction.
"""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from artifacts import ModelConfig
from kernels import linear

Clock = Callable[[], float]
"""Seconds from any fixed moment, never going back."""

_STEPS = 20  # enough to be steady, few enough to show a change within a screen of log lines
_MEASURING_SECONDS = 0.2
_SMALLEST, _LARGEST = 128, 8192  # sides of the measured product
_LONG_ENOUGH = 0.01  # seconds of one product, beside which its dispatch is nothing


class PaceMeter:
    """Trained tokens per second over the newest steps, from the moments at which metrics come.

    The time of a step runs from `resume` to `step`. Whoever handles a metric calls `resume` when it is done,
    so that validation, which lies between a train metric and its own, and the handling itself are left out.
    What the loop does between two metrics, such as writing a checkpoint, is not.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._steps = deque[tuple[int, float]](maxlen=_STEPS)

    def resume(self) -> None:
        """The next step's time begins."""
        self._since = self._clock()

    def step(self, token_count: int | None) -> float | None:
        """A step of that many trained tokens ended; tokens per second, None while that is unknown."""
        if self._since is not None and token_count is not None:
            self._steps.append((token_count, self._clock() - self._since))
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else None


def flops_per_token(config: ModelConfig, context_size: int, adapter_weights: int = 0) -> float:
    """Floating point operations to learn one token: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    N is the weights of the linear layers: looking up an embedding multiplies nothing. 2 operations a weight
    go forward, 2 give the gradient of the inputs and 2 that of the weight. L blocks of width D attend over a
    context of T tokens; the formula counts the half that a causal mask spares. With adapters the weights
    below them are frozen and need no gradient of their own: 4 N + 6 times the adapters' weights.
    """
    width = config.model_width
    block = 4 * width * width + 2 * width * config.feed_forward_width
    weights = config.block_count * block + width * config.vocabulary_size
    attention = 12 * config.block_count * width * context_size
    return (4 if adapter_weights else 6) * weights + 6 * adapter_weights + attention


def matrix_limit(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of several square matrix products with the threads of now; takes about 0.2 s.

    Those of int8 are of float32 matrices, as in training. Draws nothing from a global generator.
    """
    side, seconds = _SMALLEST, _product_seconds(_SMALLEST, device, dtype, tries=2)
    while seconds < _LONG_ENOUGH and side < _LARGEST:
        side *= 2
        seconds = _product_seconds(side, device, dtype, tries=2)
    tries = max(1, int(_MEASURING_SECONDS / seconds))
    return 2 * side**3 / min(seconds, _product_seconds(side, device, dtype, tries=min(tries, 50)))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: of tensors on a CUDA device, elsewhere of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@torch.no_grad()
def _product_seconds(side: int, device: torch.device, dtype: torch.dtype, *, tries: int) -> float:
    """Seconds of the fastest of some products of two `[side, side]` matrices."""
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.rand((side, side), generator=generator, device=device)
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    if dtype == torch.int8:
        product = partial(linear, operands="int8")
    else:
        matrix = matrix.to(dtype)
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        float(product(matrix, matrix)[0, 0])  # reading a number waits for a device that works on its own
        best = min(best, time.perf_counter() - start)
    return best
