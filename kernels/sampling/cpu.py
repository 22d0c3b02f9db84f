"""The draw by `native/sampling.cpp`: float32 and float64 logits, exact to the contract."""

from typing import Any

import torch
from torch import Tensor

from kernels.native import Integer, Pointer, function, pointer

_native = function("riftco_sample", Pointer, *[Integer] * 3, *[Pointer] * 7, Integer)
_greedy = function("riftco_greedy", Pointer, Integer, Integer, Pointer)

built = _native is not None


def sample(
    logits: Tensor,
    uniforms: Tensor,
    top_k: Tensor,
    settings: Tensor,
    counts: Tensor | None,
    prompt: Tensor | None,
) -> Any:
    """As `reference.sample`; bf16 logits are widened."""
    if logits.device.type != "cpu" or _native is None:
        return NotImplemented
    wide = logits.dtype == torch.float64
    logits = (logits if wide else logits.float()).contiguous()
    rows, vocabulary = logits.shape
    ids, logprobs = (logits.new_empty(rows, dtype=dtype) for dtype in (torch.int64, torch.float32))
    counts = None if counts is None else counts.to(torch.int64).contiguous()
    prompt = None if prompt is None else prompt.contiguous()
    inputs = [pointer(x) for x in (uniforms, top_k, settings, counts, prompt)]
    outputs = (pointer(ids), pointer(logprobs))
    _native(pointer(logits), wide, rows, vocabulary, *inputs, *outputs, torch.get_num_threads())
    return ids, logprobs


def greedy(logits: Tensor) -> Any:
    """As `reference.greedy`, of float32."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or _greedy is None:
        return NotImplemented
    logits = logits.contiguous()
    ids = logits.new_empty(len(logits), dtype=torch.int64)
    _greedy(logits.data_ptr(), *logits.shape, ids.data_ptr())
    return ids
