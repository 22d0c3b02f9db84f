"""Decoding on the CPU: one native call from token ids to logits, and the draw, against eager torch.

Model: width 256, 6 blocks, 8 heads, vocabulary 4,096, every row at position 100 of its own sequence. The peer
is a plain eager decode in torch with a contiguous, preallocated cache, one `linear` for queries, keys and
values, `scaled_dot_product_attention`, exact GELU, float32 weights, all rows in one batch: leaner than
`DecodeSession`. One thread, CPU time, ours and the peer in turns. `gb_s` is the weights read in a step by its
time; `limit_gb_s` what a sum over as many bytes reaches in the same run.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Row, row
from benchmarks.kernel_rows.timing import one_thread, seconds
from kernels.decode_step import DecodeWeights, decode_step
from kernels.sampling import sample

WIDTH, HEADS, BLOCKS, INNER, VOCABULARY, CONTEXT, PAGE = 256, 8, 6, 1024, 4096, 256, 16
POSITION = 100
TARGETS = {1: 3.0, 16: 2.0}


def model_tensors() -> dict[str, Tensor]:
    """Random weights by the bundle's names."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    tensors = {
        "token_embedding.weight": weight(VOCABULARY, WIDTH),
        "position_embedding.weight": weight(CONTEXT, WIDTH),
    }
    for number in range(BLOCKS):
        block = f"blocks.{number}."
        for norm in ("attention_norm", "feed_forward_norm"):
            tensors |= {f"{block}{norm}.scale": torch.ones(WIDTH), f"{block}{norm}.bias": torch.zeros(WIDTH)}
        shapes = dict.fromkeys(("query", "key", "value", "output"), (WIDTH, WIDTH))
        linears = {f"attention.{name}": shape for name, shape in shapes.items()}
        linears |= {"feed_forward.expand": (INNER, WIDTH), "feed_forward.project": (WIDTH, INNER)}
        for name, shape in linears.items():
            tensors |= {f"{block}{name}.weight": weight(*shape), f"{block}{name}.bias": weight(shape[0])}
    tensors |= {"final_norm.scale": torch.ones(WIDTH), "final_norm.bias": torch.zeros(WIDTH)}
    head = "language_model_head"
    return tensors | {f"{head}.weight": weight(VOCABULARY, WIDTH), f"{head}.bias": weight(VOCABULARY)}


class EagerDecode:
    """The peer: everything a step needs laid out beforehand, then one torch call after another."""

    def __init__(self, tensors: dict[str, Tensor], rows: int) -> None:
        self.ends, self.blocks = tensors, []
        for number in range(BLOCKS):
            block = {
                name.split(".", 2)[2]: x
                for name, x in tensors.items()
                if name.startswith(f"blocks.{number}.")
            }
            for part in ("weight", "bias"):
                names = [f"attention.{name}.{part}" for name in ("query", "key", "value")]
                block[f"qkv.{part}"] = torch.cat([block[name] for name in names])
            self.blocks.append(block)
        shape = (BLOCKS, 2, rows, HEADS, CONTEXT, WIDTH // HEADS)
        self.cache = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def step(self, token_ids: Tensor) -> Tensor:
        """Logits `[rows, V]` for tokens at POSITION."""
        ends = self.ends
        x = ends["token_embedding.weight"][token_ids] + ends["position_embedding.weight"][POSITION]
        for block, cache in zip(self.blocks, self.cache, strict=True):
            a = functional.layer_norm(
                x, (WIDTH,), block["attention_norm.scale"], block["attention_norm.bias"], 1e-5
            )
            heads = functional.linear(a, block["qkv.weight"], block["qkv.bias"]).view(
                -1, 3, HEADS, 1, WIDTH // HEADS
            )
            cache[:, :, :, POSITION] = heads[:, 1:, :, 0].transpose(0, 1)
            seen = cache[:, :, :, : POSITION + 1]
            context = functional.scaled_dot_product_attention(heads[:, 0], seen[0], seen[1]).view(-1, WIDTH)
            x = x + functional.linear(
                context, block["attention.output.weight"], block["attention.output.bias"]
            )
            a = functional.layer_norm(
                x, (WIDTH,), block["feed_forward_norm.scale"], block["feed_forward_norm.bias"], 1e-5
            )
            a = functional.linear(a, block["feed_forward.expand.weight"], block["feed_forward.expand.bias"])
            a = functional.gelu(a)
            x = x + functional.linear(
                a, block["feed_forward.project.weight"], block["feed_forward.project.bias"]
            )
        x = functional.layer_norm(x, (WIDTH,), ends["final_norm.scale"], ends["final_norm.bias"], 1e-5)
        return functional.linear(x, ends["language_model_head.weight"], ends["language_model_head.bias"])


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Least and median CPU seconds of each call; they take turns, and each round's order is turned round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls] * 3:
        calls[name]()
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            times[name].append(seconds(calls[name]))
    return {name: (min(seconds), median(seconds)) for name, seconds in times.items()}


def ours(weights: DecodeWeights, rows: int) -> Callable[[], Tensor]:
    """A step of `rows` sequences at POSITION."""
    pages_each = POSITION // PAGE + 1
    shape = (rows * pages_each, HEADS, PAGE, WIDTH // HEADS)
    generator = torch.Generator().manual_seed(1)
    key_pages, value_pages = (
        [torch.randn(shape, generator=generator) for _ in range(BLOCKS)] for _ in range(2)
    )
    table = torch.randperm(shape[0], generator=generator).view(rows, pages_each)
    token_ids, positions = torch.arange(rows), torch.full((rows,), POSITION)
    return lambda: decode_step(weights, token_ids, positions, table, key_pages, value_pages)


def decode_rows(quick: bool) -> Iterator[Row]:
    """One row for each kind of weights and number of rows."""
    tensors, rounds = model_tensors(), 30 if quick else 200
    kinds = ("float32", "bfloat16", "int8", "nf4")
    weights = {
        kind: DecodeWeights.prepare(tensors, head_count=HEADS, kind=kind)  # type: ignore[arg-type]
        for kind in kinds
    }
    for count in (1, 4, 16):
        token_ids = torch.arange(count)
        peer = EagerDecode(tensors, count)
        calls: dict[str, Callable[[], Any]] = {kind: ours(weights[kind], count) for kind in kinds}
        calls["eager"] = lambda peer=peer, token_ids=token_ids: peer.step(token_ids)
        read = {kind: getattr(weights[kind].panels, "bytes", 0) for kind in kinds}
        for kind in kinds:
            block = torch.ones(max(read[kind], 4) // 4)
            calls[f"limit {kind}"] = block.sum
        with torch.no_grad():
            times = interleaved(calls, rounds)
        for kind in kinds:
            least, middle = times[kind]
            yield row(
                f"decode step, {count} rows, {kind} weights",
                count / least,
                "tokens/s",
                "eager torch float32, contiguous cache",
                count / times["eager"][0],
                TARGETS.get(count),
                median_ratio=round(times["eager"][1] / middle, 3),
                milliseconds=round(1000 * least, 4),
                gb_s=round(read[kind] / least / 1e9, 2),
                limit_gb_s=round(read[kind] / times[f"limit {kind}"][0] / 1e9, 2),
            )


def torch_sample(logits: Tensor, top_k: int | None) -> Tensor:
    """The peer of `sample`: what an eager engine does, without the contract's order and exact sum."""
    if top_k is None:
        return torch.multinomial(torch.softmax(logits / 0.8, -1), 1)
    best, ids = logits.topk(top_k)
    return ids.gather(1, torch.multinomial(torch.softmax(best / 0.8, -1), 1))


def sampling_rows(quick: bool) -> Iterator[Row]:
    """Rows of logits to ids, exact to the contract, against softmax and multinomial in float32."""
    generator = torch.Generator().manual_seed(0)
    for count, vocabulary in ((1, 4096), (16, 4096), (16, 50257)):
        logits = torch.randn(count, vocabulary, generator=generator) * 3
        uniforms = torch.rand(count, dtype=torch.float64, generator=generator)
        for top_k in (None, 50):
            calls = {
                "ours": partial(sample, logits, temperature=0.8, top_k=top_k, uniforms=uniforms),
                "peer": partial(torch_sample, logits, top_k),
            }
            times = interleaved(calls, 20 if quick else 100)
            yield row(
                f"sampling, {count} x {vocabulary}, temperature 0.8, top_k {top_k}",
                times["ours"][0] * 1e6,
                "us",
                "eager torch: topk, softmax, multinomial",
                times["peer"][0] * 1e6,
                None,
                median_ratio=round(times["peer"][1] / times["ours"][1], 3),
            )


def rows(quick: bool) -> list[Row]:
    """All rows of this benchmark, on one thread."""
    with one_thread():
        return [*decode_rows(quick), *sampling_rows(quick)]
