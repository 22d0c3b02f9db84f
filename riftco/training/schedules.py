"""How the learning rate changes over a run."""

import math
from collections.abc import Callable

from riftco.config import OptimizationConfig


def learning_rate_schedule(
    config: OptimizationConfig, *, peak: float, steps: int
) -> Callable[[int], float] | None:
    """The learning rate of each optimiser step 1..steps, or None where it never changes.

    Linear warm-up (step s has peak * s / warmup_steps), then constant, cosine or trapezoid. The cosine
    (Loshchilov & Hutter 2016, half a period) starts at the peak; the trapezoid (Zhai et al. 2022) stays there
    and falls linearly over the last `cooldown_fraction` of all steps, or where a warm-up reaches into these
    falls from where the two lines meet. Both would reach zero one step after the last: no step is wasted on
    a rate of zero.
    """
    warmup = config.warmup_steps
    if config.schedule == "constant" and not warmup:
        return None

    def rate(step: int) -> float:
        rising = peak * step / warmup if step <= warmup else peak
        if config.schedule == "trapezoid":
            cooldown = max(1, round(config.cooldown_fraction * steps))
            return min(rising, peak * ((steps - step + 1) / (cooldown + 1)))
        if config.schedule == "constant" or step <= warmup:
            return rising
        progress = (step - 1 - warmup) / (steps - warmup)
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))

    return rate
