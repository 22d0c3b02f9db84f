"""Packed weights, adapters and Adam beside torch and bitsandbytes; rows for `benchmarks/kernels.py`.

Times are processor time of one thread: ours and the peer take turns, the least of the rounds counts and the
median is beside it. Weights are 768 x 3072; where it matters several are used in turn, so that dense ones do
not stay in the cache.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.kernel_rows.timing import one_thread, read_limit, seconds
from kernels import PackedNf4, adam_step, dequantize_nf4, lora_linear, nf4_linear, quantize_nf4

SHAPE = (768, 3072)
COUNT = SHAPE[0] * SHAPE[1]
COPIES = 8  # 75 MB dense, more than any cache


def rows(quick: bool) -> list[dict[str, Any]]:
    """One row for each promise; `ratio` is the peer's time over ours."""
    with one_thread():
        torch.manual_seed(0)
        limit = read_limit()
        found = [*_products(quick), _training_step(quick), *_bitsandbytes(quick), _adapted_step(quick)]
        return [{**row, "read_limit_gb_s": limit} for row in [*found, *_adam(quick)]]


def _compare(
    work: str,
    ours: Callable[[], Any],
    peer: str,
    theirs: Callable[[], Any] | None,
    target: float | None,
    repeats: int,
    calls: int = 1,
    **extra: Any,
) -> dict[str, Any]:
    """A row; `calls` is how many products one call of `ours` or `theirs` makes."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repeats):
        for name, call in (("ours", ours), ("theirs", theirs)):
            if call is not None:
                times[name].append(seconds(call) / calls * 1e6)
    least = {name: min(found) if found else None for name, found in times.items()}
    median = {name: statistics.median(found) if found else None for name, found in times.items()}
    mine, other = least["ours"], least["theirs"]
    assert mine is not None
    ratio = None if other is None else other / mine
    return {
        "work": work,
        "ours": mine,
        "ours_median": median["ours"],
        "unit": "us",
        "peer": peer,
        "peer_value": other,
        "peer_median": median["theirs"],
        "ratio": ratio,
        "target": target,
        "met": None if ratio is None or target is None else ratio >= target,
        **extra,
    }


def _weights() -> tuple[list[torch.Tensor], list[PackedNf4]]:
    dense = [torch.randn(SHAPE) for _ in range(COPIES)]
    return dense, [quantize_nf4(weight) for weight in dense]


def _products(quick: bool) -> list[dict[str, Any]]:
    """Few rows against dense float32: decoding instead of reading."""
    dense, packed = _weights()
    found = []
    for count, target in ((1, 2.0), (4, None), (16, None)):
        x = torch.randn(count, SHAPE[1])
        row = _compare(
            f"NF4 product, {count} rows x 768 x 3072",
            lambda x=x: [nf4_linear(x, weight) for weight in packed],
            "torch linear, float32",
            lambda x=x: [linear(x, weight) for weight in dense],
            target,
            repeats=5 if quick else 40,
            calls=COPIES,
        )
        row["gflop_s"] = 2 * count * COUNT / row["ours"] / 1e3
        row["peer_gb_s"] = 4 * COUNT / row["peer_value"] / 1e3
        found.append(row)
    return found


def _training_step(quick: bool) -> dict[str, Any]:
    """Forward and backward of a frozen layer at 2,048 rows: at most 1.25 times the dense one's time."""
    packed = quantize_nf4(torch.randn(SHAPE))
    weight = dequantize_nf4(packed)
    x = torch.randn(256 if quick else 2048, SHAPE[1], requires_grad=True)
    upstream = torch.randn(len(x), SHAPE[0])
    row = _compare(
        f"NF4 forward and backward, {len(x)} rows x 768 x 3072",
        lambda: torch.autograd.grad(nf4_linear(x, packed), x, upstream),
        "torch linear, float32, frozen",
        lambda: torch.autograd.grad(linear(x, weight), x, upstream),
        1 / 1.25,
        repeats=3 if quick else 7,
    )
    return {**row, "gflop_s": 4 * len(x) * COUNT / row["ours"] / 1e3}


def _bitsandbytes(quick: bool) -> list[dict[str, Any]]:
    try:
        import bitsandbytes
    except ImportError:
        bitsandbytes = None
    packed = quantize_nf4(torch.randn(SHAPE))
    weight = dequantize_nf4(packed)
    found = []
    for count in (1, 16, 256):
        x = torch.randn(count, SHAPE[1])
        theirs, peer = None, "bitsandbytes is not installed"
        if bitsandbytes is not None:
            functional = bitsandbytes.functional
            codes, state = functional.quantize_4bit(
                weight, blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            peer = f"bitsandbytes {bitsandbytes.__version__}"

            def theirs(x=x, codes=codes, state=state):
                return bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state)

        work = f"NF4 product, {count} rows x 768 x 3072, weight in the cache"
        repeats = 5 if quick else 15
        found.append(_compare(work, lambda x=x: nf4_linear(x, packed), peer, theirs, 1.0, repeats))
    return found


def _adapted_step(quick: bool) -> dict[str, Any]:
    """A LoRA layer over a frozen dense weight, forward and backward."""
    x = torch.randn(256 if quick else 2048, SHAPE[1], requires_grad=True)
    weight, bias = torch.randn(SHAPE), torch.randn(SHAPE[0])
    a = torch.randn(8, SHAPE[1], requires_grad=True)
    b = torch.randn(SHAPE[0], 8, requires_grad=True)
    upstream = torch.randn(len(x), SHAPE[0])

    def composed() -> Any:
        y = linear(x, weight, bias) + (x @ a.T) @ b.T * 2.0
        return torch.autograd.grad(y, (x, a, b), upstream)

    return _compare(
        f"LoRA forward and backward, {len(x)} rows x 768 x 3072, rank 8",
        lambda: torch.autograd.grad(lora_linear(x, weight, bias, a, b, 2.0), (x, a, b), upstream),
        "torch operations",
        composed,
        1.0,
        repeats=3 if quick else 7,
    )


def _adam(quick: bool) -> list[dict[str, Any]]:
    """200 tensors of 7 million values, clipping included."""
    shapes = [(256, 256)] * 60 + [(1024, 256)] * 6 + [(256, 1024)] * 5 + [(256,)] * 128 + [(896, 256)]
    state = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
    gradients = [torch.randn(shape) for shape in shapes]
    count = sum(gradient.numel() for gradient in gradients)
    moments = [[torch.zeros(gradient.numel()) for gradient in gradients] for _ in range(2)]
    paged = [[list(torch.zeros(g.numel()).split(4096)) for g in gradients] for _ in range(2)]
    theirs = [parameter.requires_grad_() for parameter in state[1]]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.0, fused=True)

    def peer() -> None:
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()

    found = []
    for kind, (first, second) in (("contiguous", moments), ("pages of 4,096", paged)):
        row = _compare(
            f"Adam with clipping, {len(shapes)} tensors, {count:,} values, {kind} moments",
            lambda first=first, second=second: adam_step(
                state[0], gradients, first, second, beta1_power=0.9, beta2_power=0.999
            ),
            "torch AdamW, fused, and clip_grad_norm_",
            peer,
            1.0 if kind == "contiguous" else None,
            repeats=5 if quick else 25,
        )
        found.append({**row, "gb_s": 44 * count / row["ours"] / 1e3})
    return found
