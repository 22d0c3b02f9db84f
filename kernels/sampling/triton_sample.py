"""The draw in Triton, in float32 and without sorting.

Grid: one program for each row, on axis 0. A program owns its row of logits `[V]` and writes one id and one
log-probability. The order of (-logit, id) is the order of a 32-bit key and then of ids; "the first in that
order whose cumulative weight passes a target" is found 4 bits of the key at a time: a pass over the row adds
up the weights of 16 buckets. So top_k, top_p and the draw cost 8 passes each where they are asked for, with 3
others; a pass reads 2 or 4 bytes a logit, after the first one mostly from the cache, and makes 2 x 16
compare-and-adds. Logits float32 or bf16, everything else float32: the reduction to buckets adds in another
order than the contract's walk, so that a uniform within about 1e-6 of a boundary may give the neighbour
there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.reference import penalize

BLOCK = 1024
WARPS = 8
_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _key(x):
    """Smaller for larger logits; -0 and 0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit(key):
    return tl.where(key >> 31 == 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, best, temperature):
    return tl.exp((x - best) / temperature)


@triton.jit
def _select(
    row_ptr,
    stride: tl.int64,
    vocabulary,
    best,
    temperature,
    min_p,
    cut,
    target,
    COUNT: tl.constexpr,
    INCLUSIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key of the first id whose cumulative weight passes the target, the weight before, how many have it.

    Only keys up to `cut` with weights of at least min_p count; every weight is 1 with COUNT. INCLUSIVE:
    reaching the target is enough. The last key if none passes.
    """
    buckets = tl.arange(0, 16)
    prefix = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    equal = tl.full([], 0, tl.int32)
    for level in range(8):
        shift = tl.full([], 28, tl.uint32) - 4 * level
        weights = tl.zeros([16], tl.float32)
        counts = tl.zeros([16], tl.int32)
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + i * stride, mask=i < vocabulary, other=-float("inf")).to(tl.float32)
            key = _key(x)
            weight = _weight(x, best, temperature)
            inside = (i < vocabulary) & (key <= cut) & (weight >= min_p) & ((key >> shift) >> 4 == prefix)
            bucket = ((key >> shift) & 15).to(tl.int32)
            hit = inside[None, :] & (bucket[None, :] == buckets[:, None])
            counts += tl.sum(hit.to(tl.int32), axis=1)
            if not COUNT:
                weights += tl.sum(tl.where(hit, weight[None, :], 0.0), axis=1)
        if COUNT:
            weights = counts.to(tl.float32)
        cumulative = above + tl.cumsum(weights, axis=0)
        passed = cumulative >= target if INCLUSIVE else cumulative > target
        first = tl.min(tl.where(passed & (counts > 0), buckets, 16), axis=0)
        last = tl.max(tl.where(counts > 0, buckets, 0), axis=0)
        chosen = tl.minimum(first, last)
        above += tl.sum(tl.where(buckets < chosen, weights, 0.0), axis=0)
        equal = tl.sum(tl.where(buckets == chosen, counts, 0), axis=0)
        prefix = (prefix << 4) | chosen.to(tl.uint32)
    return prefix, above, equal


@triton.jit
def _sample_kernel(
    logits_ptr,
    penalized_ptr,
    uniforms_ptr,
    top_k_ptr,
    settings_ptr,
    ids_ptr,
    logprobs_ptr,
    stride_lr: tl.int64,
    stride_lv: tl.int64,
    stride_pr: tl.int64,
    stride_pv: tl.int64,
    stride_sr: tl.int64,
    stride_ss: tl.int64,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_lr
    penalized_ptr += row * stride_pr
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    uniform = tl.load(uniforms_ptr + row)
    temperature = tl.load(settings_ptr + row * stride_sr)
    top_p = tl.load(settings_ptr + row * stride_sr + stride_ss)
    min_p = tl.load(settings_ptr + row * stride_sr + 2 * stride_ss)

    highest = tl.full([], -float("inf"), tl.float32)  # of the logits as given
    best = tl.full([], -float("inf"), tl.float32)  # after penalties
    spoilt = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i * stride_lv, mask=i < vocabulary, other=0.0).to(tl.float32)
        p = tl.load(penalized_ptr + i * stride_pv, mask=i < vocabulary, other=0.0).to(tl.float32)
        finite = (tl.abs(x) < float("inf")) & (tl.abs(p) < float("inf"))  # NaN compares false
        spoilt += tl.sum((finite == 0).to(tl.int32), axis=0)
        highest = tl.maximum(highest, tl.max(tl.where(i < vocabulary, x, -float("inf")), axis=0))
        best = tl.maximum(best, tl.max(tl.where(i < vocabulary, p, -float("inf")), axis=0))

    cut = tl.full(
        [], 0xFFFFFFFF, tl.uint32
    )  # ids with larger keys are out, and of those with this one all but
    kept = vocabulary + tl.full([], 0, tl.int32)  # the first so many
    if top_k < vocabulary:
        cut, above, kept = _select(
            penalized_ptr, stride_pv, vocabulary, best, temperature, 0.0, cut, top_k - 1.0, True, False, BLOCK
        )
        kept = top_k - above.to(tl.int32)

    exponentials = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)  # of the weights before the cut; those at it come below
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i * stride_lv, mask=i < vocabulary, other=-float("inf")).to(tl.float32)
        p = tl.load(penalized_ptr + i * stride_pv, mask=i < vocabulary, other=-float("inf")).to(tl.float32)
        exponentials += tl.sum(tl.exp(x - highest), axis=0)
        total += tl.sum(
            tl.where((i < vocabulary) & (_key(p) < cut), _weight(p, best, temperature), 0.0), axis=0
        )
    if top_k < vocabulary:
        total += kept * _weight(_logit(cut), best, temperature)

    if top_p < 1.0:
        target = top_p * total
        key, above, equal = _select(
            penalized_ptr, stride_pv, vocabulary, best, temperature, 0.0, cut, target, False, True, BLOCK
        )
        weight = _weight(_logit(key), best, temperature)
        needed = tl.minimum(tl.ceil((target - above) / tl.maximum(weight, 1e-37)), equal * 1.0).to(tl.int32)
        kept = tl.where(key == cut, tl.minimum(needed, kept), needed)
        kept = tl.maximum(kept, 1)
        cut = key
        total = above + kept * weight

    if min_p > 0.0:
        total = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            i = start + tl.arange(0, BLOCK)
            p = tl.load(penalized_ptr + i * stride_pv, mask=i < vocabulary, other=-float("inf")).to(
                tl.float32
            )
            weight = _weight(p, best, temperature)
            inside = (i < vocabulary) & (_key(p) < cut) & (weight >= min_p)
            total += tl.sum(tl.where(inside, weight, 0.0), axis=0)
        if (top_k < vocabulary) | (top_p < 1.0):
            weight = _weight(_logit(cut), best, temperature)
            total += tl.where(weight >= min_p, kept * weight, 0.0)

    target = uniform * total
    key, above, equal = _select(
        penalized_ptr, stride_pv, vocabulary, best, temperature, min_p, cut, target, False, False, BLOCK
    )
    weight = tl.maximum(_weight(_logit(key), best, temperature), 1e-37)
    passed = tl.minimum(tl.maximum((target - above) / weight, 0.0), equal - 1.0).to(tl.int32)
    passed = tl.where(key == cut, tl.minimum(passed, kept - 1), passed)

    chosen = tl.full([], -1, tl.int32)
    before = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        i = start + tl.arange(0, BLOCK)
        p = tl.load(penalized_ptr + i * stride_pv, mask=i < vocabulary, other=0.0).to(tl.float32)
        same = ((i < vocabulary) & (_key(p) == key)).to(tl.int32)
        rank = before + tl.cumsum(same, axis=0) - 1
        chosen = tl.maximum(chosen, tl.max(tl.where((same == 1) & (rank == passed), i, -1), axis=0))
        before += tl.sum(same, axis=0)
    chosen = tl.where(spoilt > 0, -1, chosen)
    x = tl.load(logits_ptr + chosen * stride_lv, mask=chosen >= 0, other=0.0).to(tl.float32)
    logprob = tl.maximum(x - highest - tl.log(exponentials), -3.4028234663852886e38)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(logprobs_ptr + row, logprob)


def sample(
    logits: Tensor,
    uniforms: Tensor,
    top_k: Tensor,
    settings: Tensor,
    counts: Tensor | None,
    prompt: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.sampling.reference.sample` in float32; NotImplemented for float64 logits."""
    if logits.dtype == torch.float64:
        return NotImplemented
    rows, vocabulary = logits.shape
    device = logits.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return ids, logprobs
    penalized = logits
    if counts is not None or prompt is not None:
        penalized = penalize(logits.float(), settings.to(device), counts, prompt)
    greedy = settings[:, 0] == 0
    neutral = settings.new_tensor([1.0, 1.0, 0.0], dtype=torch.float32)
    simple = torch.where(greedy[:, None], neutral, settings[:, :3].float().clamp(max=3e38)).to(device)
    simple[:, 0].clamp_(min=_TINY)
    kept = torch.where(greedy, 1, top_k).to(device)
    _sample_kernel[(rows,)](
        logits,
        penalized,
        uniforms.to(device, torch.float32).clamp(max=1 - 2.0**-24),
        kept,
        simple,
        ids,
        logprobs,
        *logits.stride(),
        *penalized.stride(),
        *simple.stride(),
        vocabulary,
        BLOCK=min(BLOCK, max(32, triton.next_power_of_2(vocabulary))),
        num_warps=WARPS,
    )
    return ids, logprobs
