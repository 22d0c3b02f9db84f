"""GELU, layer norm and cross-entropy on the CPU beside torch's own operations, forward and backward.

Times are processor time of one thread, the least of rounds in which ours and the peer take turns, in
milliseconds; `ratio` is peer / ours. Next to them stands what was reached in GB/s or GFLOP/s and the limit
measured in the same run: a large copy, and a float32 product of 1,024 x 1,024. Memory is the growth of the
peak resident size of a child process, and its `ratio` is ours / peer.
"""

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_rows.timing import copy_limit, one_thread, product_limit, seconds
from kernels.cross_entropy import linear_cross_entropy
from kernels.gelu import gelu
from kernels.layer_norm import layer_norm

Step = Callable[[], None]
TOKENS, WIDTH = 2048, 256


def rows(quick: bool) -> list[dict[str, Any]]:
    """One row per comparison; `quick` takes fewer rounds and leaves the larger vocabulary out."""
    with one_thread():
        return _rows(quick)


def _rows(quick: bool) -> list[dict[str, Any]]:
    rounds = 5 if quick else 25
    copy_rate, product_rate = copy_limit(), product_limit()
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        table += [
            _compare(_gelu_steps(dtype), "bias + GELU 2048 x 1024", 1.5 if dtype == torch.bfloat16 else None,
                     rounds, bytes_moved=5 * TOKENS * 1024 * dtype.itemsize, limit=copy_rate),
            _compare(_norm_steps(dtype, False), "layer norm 2048 x 256", None, rounds,
                     bytes_moved=5 * TOKENS * WIDTH * dtype.itemsize, limit=copy_rate),
            _compare(_norm_steps(dtype, True), "residual + layer norm 2048 x 256", None, rounds,
                     bytes_moved=8 * TOKENS * WIDTH * dtype.itemsize, limit=copy_rate),
        ]  # fmt: skip
    for vocabulary in (4096,) if quick else (4096, 50257):
        name = f"linear + cross-entropy 2048 x 256 x {vocabulary}"
        few = min(rounds, 5) if vocabulary < 10_000 else 2
        operations = 6 * TOKENS * WIDTH * vocabulary
        steps = _loss_steps(torch.float32, vocabulary)
        table.append(_compare(steps, name, 1.3, few, operations=operations, limit=product_rate))
        if not quick:
            table.append(_memory(vocabulary, 2.5 if vocabulary > 10_000 else None))
    return table


def _compare(
    steps: tuple[str, Step, Step],
    work: str,
    target: float | None,
    rounds: int,
    *,
    limit: float,
    bytes_moved: int = 0,
    operations: int = 0,
) -> dict[str, Any]:
    dtype, ours, theirs = steps
    found: tuple[list[float], list[float]] = ([], [])
    ours(), theirs()
    for _ in range(rounds):
        for step, times in zip((ours, theirs), found, strict=True):
            times.append(seconds(step))
    mine, peer = (min(times) for times in found)
    unit = "GB/s" if bytes_moved else "GFLOP/s"
    row: dict[str, Any] = {"work": f"{work} {dtype}, forward and backward", "ours": round(mine * 1e3, 3)}
    row |= {"unit": "ms", "peer": "torch", "peer_value": round(peer * 1e3, 3), "ratio": round(peer / mine, 2)}
    row |= {"target": target, "met": None if target is None else peer / mine >= target}
    row |= {"median": round(sorted(found[0])[rounds // 2] * 1e3, 3)}
    row |= {"peer_median": round(sorted(found[1])[rounds // 2] * 1e3, 3)}
    return row | {unit: round((bytes_moved or operations) / mine / 1e9, 1), f"limit {unit}": round(limit, 1)}


def _leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def _step(leaves: list[Tensor], upstream: list[Tensor | None], forward: Callable[[], Any]) -> None:
    results = forward()
    results = list(results) if isinstance(results, tuple) else [results]
    torch.autograd.backward(results, upstream)
    for leaf in leaves:
        leaf.grad = None


def _gelu_steps(dtype: torch.dtype) -> tuple[str, Step, Step]:
    x, bias = _leaf(TOKENS, 1024, dtype=dtype), _leaf(1024, dtype=dtype)
    run = partial(_step, [x, bias], [torch.randn_like(x)])
    return _name(dtype), partial(run, lambda: gelu(x, bias)), partial(run, lambda: functional.gelu(x + bias))


def _norm_steps(dtype: torch.dtype, fused: bool) -> tuple[str, Step, Step]:
    x, residual = (_leaf(TOKENS, WIDTH, dtype=dtype) for _ in range(2))
    scale, bias = (_leaf(WIDTH, dtype=dtype) for _ in range(2))
    run = partial(_step, [x, scale, bias, residual], [torch.randn_like(x) for _ in range(2 if fused else 1)])

    def theirs() -> Any:
        total = x + residual if fused else x
        normed = functional.layer_norm(total, (WIDTH,), scale, bias)
        return (normed, total) if fused else normed

    ours = partial(layer_norm, x, scale, bias, 1e-5, *([residual] if fused else []))
    return _name(dtype), partial(run, ours), partial(run, theirs)


def _loss_steps(dtype: torch.dtype, vocabulary: int) -> tuple[str, Step, Step]:
    x, weight = _leaf(TOKENS, WIDTH, dtype=dtype), _leaf(vocabulary, WIDTH, dtype=dtype, scale=WIDTH**-0.5)
    bias, targets = _leaf(vocabulary, dtype=dtype), torch.randint(vocabulary, (TOKENS,))
    run = partial(_step, [x, weight, bias], [None])

    def theirs() -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight, bias), targets)

    ours = partial(linear_cross_entropy, x, weight, bias, targets)
    return _name(dtype), partial(run, ours), partial(run, theirs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(vocabulary: int, target: float | None) -> dict[str, Any]:
    """Peak memory beyond inputs, with the gradients that both return."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        mine, peer = (pool.apply(_peak_growth, (vocabulary, position)) for position in (1, 2))
    row: dict[str, Any] = {"work": f"peak extra memory at vocabulary {vocabulary}", "ours": round(mine, 1)}
    row |= {"unit": "MB", "peer": "torch", "peer_value": round(peer, 1), "ratio": round(peer / mine, 2)}
    return row | {"target": target, "met": None if target is None else peer / mine >= target}


def _peak_growth(vocabulary: int, position: int) -> float:
    torch.set_num_threads(1)
    _loss_steps(torch.float32, 64)[position]()  # what libraries load on first use
    step = _loss_steps(torch.float32, vocabulary)[position]
    before = _peak_bytes()
    step()
    return (_peak_bytes() - before) / 1e6


def _peak_bytes() -> int:
    """Of this process alone: what getrusage says may be its parent's."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024
