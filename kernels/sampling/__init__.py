"""From logits to the next token of each row: penalties, temperature, cuts and the draw."""

from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Operation
from kernels.operators import define
from kernels.sampling import cpu, reference
from kernels.sampling.reference import SETTINGS

__all__ = ["greedy", "sample"]

Setting = float | Tensor
Range = tuple[float, float, str]  # least, greatest, and how to say so

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_LARGEST = torch.finfo(torch.float64).max
_SMALLEST = torch.finfo(torch.float64).smallest_normal
_RANGES: tuple[Range, ...] = (  # of SETTINGS
    (0.0, _LARGEST, "finite and at least 0"),
    (_SMALLEST, 1.0, "above 0 and at most 1"),
    (0.0, 1.0, "from 0 to 1"),
    (_SMALLEST, _LARGEST, "finite and above 0"),
    (-_LARGEST, _LARGEST, "finite"),
    (-_LARGEST, _LARGEST, "finite"),
)


def sample(
    logits: Tensor,
    *,
    uniforms: Tensor,
    temperature: Setting = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Setting = 1.0,
    min_p: Setting = 0.0,
    repetition_penalty: Setting = 1.0,
    presence_penalty: Setting = 0.0,
    frequency_penalty: Setting = 0.0,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token id for each row of logits `[R, V]` (float32, bfloat16 or float64).

    uniforms: float64 `[R]` in [0, 1). Every other setting is one number or a tensor `[R]`. Returns ids int64
    `[R]` and log-probabilities float32 `[R]`: of the id under softmax of the logits as given, at least the
    lowest float.

    1. Penalties, as OpenAI and vLLM define them: an id that was generated (`counts` int32 or int64 `[R, V]`,
       how often) or is in the prompt (`prompt` bool `[R, V]`) has its logit divided by repetition_penalty
       where it is positive and multiplied elsewhere; then frequency_penalty times its count is taken off and,
       where the count is not 0, presence_penalty.
    2. Temperature 0: the highest logit, the lowest id among equals.
    3. Else ids in the order of (-logit, id), of which the first top_k (1 to V, None for all) have the weight
       exp((logit - highest) / temperature).
    4. top_p keeps the shortest beginning whose weights reach top_p times their sum; min_p ends it before the
       first weight below min_p (the highest is 1). Both keep at least one.
    5. The id is the first whose cumulative weight exceeds uniform times the sum of those kept, else the last
       one.

    On CPUs all of it is binary64 with the C library's exp, and sums other than cumulative ones are exactly
    rounded: the same draw as the contract's sampler makes in Python. The Triton kernel computes in float32
    and differs where a uniform lies within rounding of a boundary. A row's result never depends on other
    rows.

    ValueError for what does not fit, for settings out of range, and for a row with logits that are not
    finite.
    """
    _check(logits, uniforms, counts, prompt)
    rows, vocabulary = logits.shape
    given = (temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty)
    settings = _columns(SETTINGS, given, _RANGES, rows, torch.float64)
    most = vocabulary if top_k is None else top_k
    kept = _columns(
        ("top_k",), (most,), ((1, vocabulary, f"1 to {vocabulary}, the vocabulary"),), rows, torch.int64
    )
    _require("uniforms", uniforms, (0.0, 1 - 2.0**-53, "in [0, 1)"))
    ids, logprobs = _sample(logits, uniforms.contiguous(), kept[:, 0], settings, counts, prompt)
    return ids, logprobs


def greedy(logits: Tensor) -> Tensor:
    """The id of the highest of each row of logits `[R, V]`, the lowest among equals: int64 `[R]`.

    What `sample` draws at temperature 0 without penalties, at a small part of its cost: it gives no
    log-probabilities. ValueError as `sample`.
    """
    _check_logits(logits)
    return _require_drawn(_highest(logits))


def _check_logits(logits: Tensor) -> None:
    if logits.ndim != 2 or logits.dtype not in _DTYPES or not logits.shape[1]:
        raise ValueError(
            "logits must be float32, bfloat16 or float64 [R, V] with V at least 1, "
            f"got {logits.dtype} {list(logits.shape)}"
        )


def _check(logits: Tensor, uniforms: Tensor, counts: Tensor | None, prompt: Tensor | None) -> None:
    _check_logits(logits)
    if uniforms.shape != logits.shape[:1] or uniforms.dtype != torch.float64 or uniforms.is_cuda:
        raise ValueError(
            f"uniforms must be float64 [{logits.shape[0]}] on the CPU, one for each row, "
            f"got {uniforms.dtype} {list(uniforms.shape)} on {uniforms.device}"
        )
    integers = (torch.int32, torch.int64)
    for name, x, dtypes in (("counts", counts, integers), ("prompt", prompt, (torch.bool,))):
        if x is not None and (x.shape != logits.shape or x.dtype not in dtypes or x.device != logits.device):
            raise ValueError(
                f"{name} must be {' or '.join(map(str, dtypes))} {list(logits.shape)} on {logits.device} "
                f"as the logits are, got {x.dtype} {list(x.shape)} on {x.device}"
            )


def _columns(
    names: tuple[str, ...],
    given: tuple[Setting, ...],
    ranges: tuple[Range, ...],
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Settings as a CPU tensor `[R, settings]`; ValueError for one out of range or of another length."""
    for name, value, span in zip(names, given, ranges, strict=True):
        if isinstance(value, Tensor) and value.shape != (rows,):
            raise ValueError(
                f"{name} must be one number or [{rows}], one for each row, got {list(value.shape)}"
            )
        _require(name, value, span)
    same = [0 if isinstance(value, Tensor) else value for value in given]
    columns = torch.tensor(same, dtype=dtype, device="cpu").repeat(rows, 1)
    for i, value in enumerate(given):
        if isinstance(value, Tensor):
            columns[:, i] = value
    return columns


def _require(name: str, value: Setting, span: Range) -> None:
    least, greatest, words = span
    values = value.tolist() if isinstance(value, Tensor) else [value]
    for row, number in enumerate(values):
        if not least <= number <= greatest:
            where = f" for row {row}" if isinstance(value, Tensor) else ""
            raise ValueError(f"{name} must be {words}, got {number}{where}")


def _triton(*arguments: Any) -> Any:
    from kernels.sampling import triton_sample  # Triton is optional and slow to import

    return triton_sample.sample(*arguments)


_choose = Operation(
    "sample", torch=reference.sample, native=cpu.sample if cpu.built else None, triton=_triton
)

_highest = Operation("greedy", torch=reference.greedy, native=cpu.greedy if cpu.built else None)


def _checked(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    ids, logprobs = _choose(logits, *rest)
    return _require_drawn(ids), logprobs


def _require_drawn(ids: Tensor) -> Tensor:
    if not ids.is_meta and -1 in (found := ids.tolist()):  # cheaper than a torch operation on a few ids
        row = found.index(-1)
        raise ValueError(
            f"row {row} has logits that are not finite, before or after its penalties; "
            "a model that gives NaN or infinity is broken"
        )
    return ids


def _fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


_sample = define(
    "sample(Tensor logits, Tensor uniforms, Tensor top_k, Tensor settings, Tensor? counts, Tensor? prompt) "
    "-> (Tensor, Tensor)",
    _checked,
    fake=_fake,
)
