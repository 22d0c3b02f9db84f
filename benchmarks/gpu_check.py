"""Every operation on the GPU at hand, in at most eight minutes: right first, then fast.

    python benchmarks/gpu_check.py [--json FILE] [--minutes 8]
    python benchmarks/gpu_check.py --dry      # small cases through Triton's interpreter, without a GPU

Needs torch (2.11 or newer), triton (3.6 or newer) and numpy alone. Correctness: every operation, dtype and
case against the definition in float64 on the CPU; the error may be twice that of torch's own operation in the
same dtype (three times for gradients). Speed: medians of many runs with a cold cache, beside torch and, where
they can be imported, Liger-Kernel and bitsandbytes, with the bandwidth and matrix rate of the same process.
There is a deadline; what did not fit is listed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # the project, wherever this is run from

import torch
import triton
from torch import Tensor
from torch.nn import functional

import kernels
from benchmarks.harness import Row, row, shown
from kernels.dispatch import use

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Check:
    """A differentiable operation and what torch has for it, on inputs of some shapes."""

    name: str
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def run(self, device: str) -> Iterator[str]:
        """One line for each dtype and each output or gradient that is too far from the truth."""
        for dtype in self.dtypes:
            generator = torch.Generator().manual_seed(7)
            inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in self.shapes]
            truth = _values(self.torchs, [x.double() for x in inputs])
            theirs = _values(self.torchs, [x.to(device) for x in inputs])
            ours, again = (_values(self.ours, [x.to(device) for x in inputs]) for _ in range(2))
            for place, (exact, peer, found, twice) in enumerate(zip(truth, theirs, ours, again, strict=True)):
                what = f"{self.name} {str(dtype)[6:]} {'output' if place == 0 else f'gradient {place}'}"
                if not torch.equal(found, twice):
                    yield f"{what}: two runs differ"
                allowed = (3 if place else 2) * _error(peer, exact) + 1e-6 * float(exact.abs().max() + 1)
                if not _error(found, exact) <= allowed:
                    yield f"{what}: error {_error(found, exact):.3g}, allowed {allowed:.3g}"


def _values(operation: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs, on the CPU; the upstream gradient is not uniform."""
    leaves = [x.requires_grad_() for x in inputs]
    out = operation(*leaves)
    upstream = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    gradients = torch.autograd.grad(out, leaves, upstream.to(out))
    return [x.detach().cpu() for x in (out, *gradients)]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max()) if found.numel() else 0.0


def checks(dry: bool) -> list[Check]:
    """The cases; dry ones are as small as shows every block and edge."""
    lengths = (1, 17, 65) if dry else (1, 63, 64, 65, 127, 513, 1024)
    widths = (24, 64) if dry else (24, 32, 40, 64, 72, 80, 96, 128)
    rows, vocabulary = (9, 130) if dry else (1031, 50_257)
    attention = [
        Check(f"attention T {length} d {width}", kernels.flash_attention, _sdpa, ((2, 3, length, width),) * 3)
        for width in widths
        for length in lengths
    ]
    targets = torch.arange(rows) * 7 % vocabulary
    return [
        *attention,
        Check("gelu", kernels.gelu, lambda x, b: functional.gelu(x + b), ((rows, 300), (300,))),
        Check(
            "layer_norm",
            lambda x, s, b: kernels.layer_norm(x, s, b, 1e-5),
            lambda x, s, b: functional.layer_norm(x, s.shape, s, b, 1e-5),
            ((rows, 300), (300,), (300,)),
        ),
        Check(
            "linear_cross_entropy",
            lambda x, w, b: kernels.linear_cross_entropy(x, w, b, targets.to(x.device)),
            lambda x, w, b: _loss(functional.linear(x, w, b), targets.to(x.device)),
            ((rows, 64), (vocabulary, 64), (vocabulary,)),
        ),
        Check(
            "lora_linear",
            lambda x, w, a, b: kernels.lora_linear(x, w, None, a, b, 2.0),
            lambda x, w, a, b: x @ w.T + 2.0 * ((x @ a.T) @ b.T),
            ((rows, 96), (80, 96), (8, 96), (80, 8)),
        ),
    ]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide, targets)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def other_checks(device: str, dry: bool) -> Iterator[str]:
    """Operations without gradients, against the same operation as torch defines it, on the CPU."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn((63, 47) if dry else (1024, 4097), generator=generator)
    packed = kernels.quantize_nf4(weight.to(device))
    with use("torch"):
        truth = kernels.dequantize_nf4(kernels.quantize_nf4(weight))
    if not torch.equal(kernels.dequantize_nf4(packed).cpu(), truth):
        yield "nf4: quantised and dequantised on the GPU it is another weight"
    x = torch.randn(5, weight.shape[1], generator=generator)
    linear = kernels.nf4_linear(x.to(device), packed).cpu().double()
    exact = x.double() @ truth.double().T
    if _error(linear, exact) > 2e-5 * float(exact.abs().max()):
        yield f"nf4_linear: error {_error(linear, exact):.3g}"
    yield from _check_paged(device, generator)
    yield from _check_adam(device, generator)


def _check_paged(device: str, generator: torch.Generator) -> Iterator[str]:
    pages = [torch.randn(40, 2, 16, 32, generator=generator) for _ in range(2)]
    q = torch.randn(4, 2, 3, 32, generator=generator)
    table = torch.randperm(40, generator=generator).view(4, 10)
    lengths = torch.tensor([3, 16, 17, 160])
    arguments = (q, *pages, table, lengths)
    found = kernels.paged_attention(*(x.to(device) for x in arguments)).cpu()
    with use("torch"):
        exact = kernels.paged_attention(*(x.double() if x.is_floating_point() else x for x in arguments))
    if _error(found, exact) > 1e-5:
        yield f"paged_attention: error {_error(found, exact):.3g}"


def _check_adam(device: str, generator: torch.Generator) -> Iterator[str]:
    state = [[torch.rand(shape, generator=generator) for shape in ((300, 7), (5,))] for _ in range(4)]
    moved = [[x.to(device) for x in tensors] for tensors in state]
    powers = {"beta1_power": 0.9, "beta2_power": 0.999}
    norm = kernels.adam_step(*moved, **powers)
    with use("torch"):
        expected = kernels.adam_step(*state, **powers)
    if abs(norm[0] - expected[0]) > 1e-12 * expected[0]:
        yield f"adam: the norm is {norm[0]}, not {expected[0]}"
    pairs = [
        (a.cpu(), b)
        for ours, exact in zip(moved, state, strict=True)
        for a, b in zip(ours, exact, strict=True)
    ]
    if not all(torch.equal(a, b) for a, b in pairs):
        yield "adam: the updated values have other bits than on the CPU"


def far_checks(device: str) -> Iterator[str]:
    """One case for each kernel whose tensors pass 2^31 elements, where 32-bit offsets would wrap."""
    rows = 2**31 // 4096 + 3
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = 1.0
    if not torch.equal(kernels.gelu(x)[-1], functional.gelu(x[-1])):
        yield "gelu: wrong beyond 2^31 elements"
    ones = torch.ones(4096, dtype=torch.bfloat16, device=device)
    if bool(kernels.layer_norm(x, ones, ones, 1e-5)[-1].isnan().any()):
        yield "layer_norm: wrong beyond 2^31 elements"
    del x
    pages = torch.zeros(2**31 // (16 * 64) + 2, 1, 16, 64, dtype=torch.bfloat16, device=device)
    pages[-1] = 1.0
    table = torch.full((1, 1), len(pages) - 1, device=device)
    q = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    if not bool(
        (kernels.paged_attention(q, pages, pages, table, torch.tensor([16], device=device)) == 1).all()
    ):
        yield "paged_attention: wrong for a page beyond 2^31 elements"


def speeds(device: str) -> Iterator[Row]:
    """Ours beside torch's and the libraries at hand, with the limits measured in this process."""
    copied = torch.empty(2**28, dtype=torch.bfloat16, device=device)
    bandwidth = 2 * copied.nbytes / _seconds(lambda: copied.clone()) / 1e9
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    rate = 2 * 8192**3 / _seconds(lambda: square @ square) / 1e12
    limits = {"copy_gb_s": round(bandwidth), "matrix_tflop_s": round(rate)}
    yield from _attention_speeds(device, limits)
    yield from _memory_speeds(device, bandwidth, limits)
    yield from _loss_speeds(device, limits)
    yield from _weight_speeds(device, limits)


def _attention_speeds(device: str, limits: dict[str, Any]) -> Iterator[Row]:
    for width, length, target in ((64, 4096, 0.8), (128, 4096, None), (64, 1024, None)):
        q, k, v, grad = (_random(device, 2, 16, length, width) for _ in range(4))
        ours = _seconds(partial(_both_ways, kernels.flash_attention, (q, k, v), grad))
        theirs = _seconds(partial(_both_ways, _sdpa, (q, k, v), grad))
        work = 3.5 * 4 * 2 * 16 * length * length * width / 2 / 1e12
        name = f"attention forward+backward, d {width}, T {length}"
        yield row(name, work / ours, "TFLOP/s", "torch SDPA", work / theirs, target, **limits)


def _both_ways(operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(operation(*leaves), leaves, grad)


def _memory_speeds(device: str, bandwidth: float, limits: dict[str, Any]) -> Iterator[Row]:
    x, scale, bias = _random(device, 16_384, 4096), _random(device, 4096), _random(device, 4096)
    cases = [
        ("bias + gelu", lambda: kernels.gelu(x, bias), lambda: functional.gelu(x + bias)),
        (
            "layer norm",
            lambda: kernels.layer_norm(x, scale, bias, 1e-5),
            lambda: functional.layer_norm(x, scale.shape, scale, bias, 1e-5),
        ),
    ]
    for name, ours, theirs in cases:
        speed, peer = (2 * x.nbytes / _seconds(call) / 1e9 for call in (ours, theirs))
        yield row(f"{name} forward", speed, "GB/s", "torch", peer, None, **limits)
        yield row(f"{name} forward", speed, "GB/s", "copy in the same run", bandwidth, 0.85, **limits)
    shapes = [(4096, 1024)] * 50
    state = [[torch.rand(shape, device=device) for shape in shapes] for _ in range(4)]
    powers = {"beta1_power": 0.9, "beta2_power": 0.999}
    parameters = [torch.nn.Parameter(p.clone()) for p in state[0]]
    for parameter, gradient in zip(parameters, state[1], strict=True):
        parameter.grad = gradient.clone()
    fused = torch.optim.AdamW(parameters, fused=True)
    ours = _seconds(lambda: kernels.adam_step(*state, **powers))
    theirs = _seconds(lambda: (torch.nn.utils.clip_grad_norm_(parameters, 1.0), fused.step()))
    yield row("adam, 200 M values", ours * 1e3, "ms", "clip + fused AdamW", theirs * 1e3, None, **limits)


def _loss_speeds(device: str, limits: dict[str, Any]) -> Iterator[Row]:
    x, weight = _random(device, 8192, 2048).requires_grad_(), _random(device, 50_257, 2048).requires_grad_()
    targets = torch.randint(50_257, (8192,), device=device)

    def ours() -> Any:
        loss = kernels.linear_cross_entropy(x, weight, None, targets)
        return torch.autograd.grad(loss, (x, weight))

    def plain() -> Any:
        return torch.autograd.grad(functional.cross_entropy((x @ weight.T).float(), targets), (x, weight))

    name = "linear + cross-entropy 8,192 x 2,048 x 50,257"
    yield row(name, _seconds(ours) * 1e3, "ms", "torch", _seconds(plain) * 1e3, None, **limits)
    yield row(f"{name}, peak", _peak(ours), "MiB", "torch", _peak(plain), 1 / 0.35, **limits)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        yield row(name, _seconds(ours) * 1e3, "ms", "Liger-Kernel", None, None, reason=str(error))
    else:
        liger = LigerFusedLinearCrossEntropyLoss()
        peer = _seconds(lambda: torch.autograd.grad(liger(weight, x, targets), (x, weight)))
        yield row(name, _seconds(ours) * 1e3, "ms", "Liger-Kernel", peer * 1e3, None, **limits)


def _weight_speeds(device: str, limits: dict[str, Any]) -> Iterator[Row]:
    weight = torch.randn(4096, 4096, device=device)
    packed = kernels.quantize_nf4(weight)
    for rows in (1, 16, 2048):
        x = _random(device, rows, 4096)
        ours = _seconds(lambda x=x: kernels.nf4_linear(x, packed))
        name = f"nf4 linear 4,096 x 4,096, {rows} rows"
        dense = _seconds(lambda x=x: x @ weight.to(x.dtype).T)
        yield row(name, ours * 1e6, "us", "cast + dense", dense * 1e6, None, **limits)
        try:
            import bitsandbytes
        except ImportError as error:
            yield row(name, ours * 1e6, "us", "bitsandbytes", None, 1.0, reason=str(error))
        else:
            codes, state = bitsandbytes.functional.quantize_4bit(weight.bfloat16(), quant_type="nf4")
            peer = _seconds(lambda x=x, c=codes, s=state: bitsandbytes.matmul_4bit(x, c.t(), quant_state=s))
            yield row(name, ours * 1e6, "us", "bitsandbytes", peer * 1e6, 1.0, **limits)


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _seconds(call: Callable[[], Any]) -> float:
    """The median time of a call whose inputs are not in the cache."""
    return triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median") / 1e3


def _peak(call: Callable[[], Any]) -> float:
    """The most memory that a call needs beside what is there, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    """Check, measure, print the table and write it as JSON; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="interpret small cases on the CPU, without speeds")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    arguments = parser.parse_args()
    if not (arguments.dry or torch.cuda.is_available()):
        parser.error("there is no GPU here; --dry runs small cases without one")
    deadline = time.monotonic() + 60 * arguments.minutes
    device = "cpu" if arguments.dry else "cuda"
    name = "Triton's interpreter" if arguments.dry else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    wrong, skipped, table = [], [], []
    with ExitStack() as stack:
        if arguments.dry:
            from tests.kernels.lab import interpret

            stack.enter_context(use("triton"))
            stack.enter_context(interpret())
        stages = [(check.name, partial(check.run, device)) for check in checks(arguments.dry)]
        stages.append(("nf4, paged attention, adam", partial(other_checks, device, arguments.dry)))
        if not arguments.dry:
            stages.append(("beyond 2^31 elements", partial(far_checks, device)))
        for stage, run in stages:
            if time.monotonic() > deadline - (0 if arguments.dry else 180):  # speeds need their time
                skipped.append(stage)
                continue
            found = list(run())
            wrong += found
            print("\n".join(found) if found else f"right: {stage}", flush=True)
        for measured in () if arguments.dry else speeds(device):
            table.append(measured)
            print(shown(measured), flush=True)
            if time.monotonic() > deadline:
                skipped.append("the remaining speeds")
                break
    result = {"device": name, "torch": torch.__version__, "wrong": wrong, "skipped": skipped, "rows": table}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(wrong)} wrong, {len(skipped)} not reached {skipped or ''}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
