"""The draw as its contract reads, in Python and binary64, and the penalties before it."""

import math
import sys
from itertools import accumulate

import torch
from torch import Tensor

SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_LOWEST = torch.finfo(torch.float32).min


def sample(
    logits: Tensor,
    uniforms: Tensor,
    top_k: Tensor,
    settings: Tensor,
    counts: Tensor | None,
    prompt: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.sampling.sample`; settings `[R, 6]` in the order of SETTINGS, id -1 for a spoilt row."""
    wide = logits.cpu().double()
    penalized = penalize(wide, settings, counts, prompt)
    ids = [
        _draw(row.tolist(), float(uniform), int(kept), *of_row[:3].tolist())
        for row, uniform, kept, of_row in zip(penalized, uniforms, top_k, settings, strict=True)
    ]
    chosen = torch.tensor(ids, dtype=torch.int64, device="cpu")
    lowered = wide.log_softmax(-1).gather(1, chosen.clamp(min=0)[:, None])[:, 0].clamp(min=_LOWEST)
    return chosen.to(logits.device), lowered.float().to(logits.device)


def greedy(logits: Tensor) -> Tensor:
    """As `kernels.greedy`; id -1 for a row that is not finite."""
    finite = logits.isfinite().all(1)
    return torch.where(finite, logits.argmax(1), -1)


def penalize(logits: Tensor, settings: Tensor, counts: Tensor | None, prompt: Tensor | None) -> Tensor:
    """Penalised logits `[R, V]`, in the dtype and on the device of the logits."""
    if counts is None and prompt is None:
        return logits
    repetition, presence, frequency = settings[:, 3:].to(logits).unsqueeze(-1).unbind(1)
    used = torch.zeros_like(logits) if counts is None else counts.to(logits)
    seen = used > 0 if prompt is None else (used > 0) | prompt.to(logits.device)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits) - frequency * used
    return torch.where(used > 0, logits - presence, logits)


def _draw(
    logits: list[float], uniform: float, top_k: int, temperature: float, top_p: float, min_p: float
) -> int:
    if not all(map(math.isfinite, logits)):
        return -1
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0]
    best = logits[order[0]]
    weights = [_weight((logits[i] - best) / temperature) for i in order[:top_k]]
    kept = len(weights)
    if top_p < 1:
        target = top_p * math.fsum(weights)
        kept = next((i + 1 for i, sum_ in enumerate(accumulate(weights)) if sum_ >= target), kept)
    if min_p > 0:
        kept = next((i for i, weight in enumerate(weights[:kept]) if weight < min_p), kept)
    threshold = uniform * math.fsum(weights[:kept])
    return next(
        (order[i] for i, sum_ in enumerate(accumulate(weights[:kept])) if threshold < sum_), order[kept - 1]
    )


def _weight(exponent: float) -> float:
    return math.exp(exponent) if exponent > -sys.float_info.max else 0.0
