"""What the rows of all operations need: one thread, processor time, and this machine's limits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels import Operands, linear


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and our native code use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(call: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def product_limit(operands: Operands = "full") -> float:
    """GFLOP/s of torch's float32 product, or of the fastest one with such operands, torch's or ours."""
    a, b = torch.randn(2, 1024, 1024)
    narrow = a.bfloat16(), b.bfloat16()
    calls = [lambda: a @ b] if operands == "full" else [lambda: linear(a, b, operands=operands)]
    if operands == "half":
        calls.append(lambda: narrow[0] @ narrow[1])
    return 2 * 1024**3 / min(seconds(call) for call in calls for _ in range(8)) / 1e9


def read_limit() -> float:
    """GB/s at which numbers are summed that the caches do not hold."""
    values = torch.ones(1 << 25)
    return values.nbytes / min(seconds(values.sum) for _ in range(8)) / 1e9


def copy_limit() -> float:
    """GB/s, read and written, of a copy that the caches do not hold."""
    source, target = torch.ones(2, 1 << 25)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(8)) / 1e9
