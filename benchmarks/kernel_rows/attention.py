"""Attention on one CPU thread beside torch's own.

Both sides alternate and CPU time is taken, so that other processes disturb both alike. `ratio` compares the
fastest runs, `median_ratio` the medians; achieved GFLOP/s or GB/s stand beside the limit measured in the same
run.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernel_rows.timing import one_thread, product_limit, read_limit, seconds
from kernels import flash_attention, kv_write, paged_attention

HEADS, PAGE = 8, 16


def rows(quick: bool) -> list[dict[str, Any]]:
    """Every comparison; `quick` takes the small sizes and few repeats."""
    with one_thread():
        return [*_flash_rows(quick), *_paged_rows(quick)]


def _flash_rows(quick: bool) -> list[dict[str, Any]]:
    limit = product_limit()
    cases = [(8, length, 32, torch.float32) for length in (256, 512)]
    if not quick:
        cases += [(2, 1024, 32, torch.float32), (1, 2048, 32, torch.float32)]
        cases += [(2, length, 64, torch.float32) for length in (256, 512, 1024, 2048)]
    found = [_flash_row(*case, 3 if quick else 9, 1.0, limit) for case in cases]
    found.append(_flash_row(8, 256, 32, torch.bfloat16, 3 if quick else 9, 1.5, limit, only_backward=True))
    found.append(_memory_row())
    return found


def _flash_row(
    batch: int,
    length: int,
    width: int,
    dtype: torch.dtype,
    repeats: int,
    target: float,
    limit: float,
    *,
    only_backward: bool = False,
) -> dict[str, Any]:
    shape = (batch, HEADS, length, width)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    upstream = torch.randn(shape).to(dtype)

    def step(attend: Callable[..., Tensor]) -> float:
        begin = time.process_time()
        out = attend(q, k, v)
        if only_backward:
            begin = time.process_time()
        out.backward(upstream)
        return time.process_time() - begin

    ours, peer = _alternate(
        lambda: step(flash_attention),
        lambda: step(lambda *x: scaled_dot_product_attention(*x, is_causal=True)),
        repeats,
    )
    products = 5 if only_backward else 7  # each a multiply-add for every pair that is seen
    gflops = products * batch * HEADS * length * (length + 1) * width / min(ours) / 1e9
    part = "backward" if only_backward else "forward and backward"
    name = str(dtype).removeprefix("torch.")
    work = f"flash attention {part} {name} {batch} x {HEADS} x {length} x {width}"
    row = _row(work, ours, peer, "torch scaled_dot_product_attention", target)
    return row | {"gflops": round(gflops, 1), "limit_gflops": round(limit, 1)}


def _memory_row() -> dict[str, Any]:
    small, large = (_allocated(length) for length in (512, 2048))
    return {
        "work": "flash attention memory, 2,048 tokens over 512 (4 is linear)",
        "ours": round(large / small, 2),
        "unit": "times",
        "peer": "linear growth",
        "peer_value": 4.0,
        "ratio": round(4 * small / large, 3),
        "target": 0.9,
        "met": large < 4.4 * small,
    }


def _allocated(length: int) -> int:
    """Bytes that forward and backward allocate, outputs included."""
    q, k, v = (torch.randn(1, HEADS, length, 32).requires_grad_() for _ in range(3))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        flash_attention(q, k, v).sum().backward()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.function_events)


def _paged_rows(quick: bool) -> list[dict[str, Any]]:
    limit = read_limit()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        q, keys, values, table, lengths = _sequences(16, dtype)

        def ours(arguments: tuple[Tensor, ...] = (q, keys, values, table, lengths)) -> float:
            return seconds(lambda: paged_attention(*arguments))

        def peer(arguments: tuple[Tensor, ...] = (q, keys, values, table, lengths)) -> float:
            return seconds(lambda: _gathered(*arguments))

        mine, theirs = _alternate(ours, peer, 10 if quick else 60)
        moved = 2 * int(lengths.sum()) * HEADS * q.shape[-1] * q.element_size()
        work = f"paged attention {dtype}, 16 sequences of up to 1,024 tokens, width 32".replace("torch.", "")
        row = _row(work, mine, theirs, "pages gathered, torch attention for each sequence", 3.0)
        found.append(row | {"gbs": round(moved / min(mine) / 1e9, 1), "limit_gbs": round(limit, 1)})
    found.append(_write_row(10 if quick else 60))
    return found


def _sequences(count: int, dtype: torch.dtype, width: int = 32) -> tuple[Tensor, ...]:
    """A query each, pages in random places, and mixed lengths of which one is 1,024."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1025, (count,), generator=generator)
    lengths[0] = 1024
    pages = 1024 // PAGE
    table = torch.randperm(count * pages, generator=generator).view(count, pages)
    shape = (count * pages, HEADS, PAGE, width)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(count, HEADS, 1, width, generator=generator).to(dtype)
    return q, keys, values, table, lengths


def _gathered(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for s, length in enumerate(lengths.tolist()):
        used = table[s, : -(-length // PAGE)]
        k, v = (x[used].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (keys, values))
        out[s : s + 1] = scaled_dot_product_attention(q[s : s + 1], k, v)
    return out


def _write_row(repeats: int) -> dict[str, Any]:
    _, keys, values, _, _ = _sequences(16, torch.float32)
    new = torch.randn(2, 256, HEADS, 32)
    slots = torch.randperm(keys.shape[0] * PAGE)[:256]

    def index() -> None:
        where = (slots // PAGE, slice(None), slots % PAGE)
        keys[where], values[where] = new[0], new[1]

    ours, peer = _alternate(
        lambda: seconds(lambda: kv_write(keys, values, new[0], new[1], slots)),
        lambda: seconds(index),
        repeats,
    )
    return _row("kv write of 256 tokens", ours, peer, "torch index_put", 1.0)


def _alternate(
    ours: Callable[[], float], peer: Callable[[], float], repeats: int
) -> tuple[list[float], list[float]]:
    pairs = [(ours(), peer()) for _ in range(repeats + 1)][1:]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _row(work: str, ours: list[float], peer: list[float], name: str, target: float) -> dict[str, Any]:
    ratio = min(peer) / min(ours)
    return {
        "work": work,
        "ours": round(min(ours) * 1e3, 3),
        "unit": "ms",
        "peer": name,
        "peer_value": round(min(peer) * 1e3, 3),
        "ratio": round(ratio, 2),
        "target": target,
        "met": ratio >= target,
        "median_ratio": round(statistics.median(peer) / statistics.median(ours), 2),
    }
