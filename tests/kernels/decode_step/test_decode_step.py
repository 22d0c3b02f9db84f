"""A decode step is the model's forward, in any company the same bits, and touches only its own slots."""

import math

import pytest
import torch
from torch import Tensor

from kernels.decode_step import DecodeWeights, cpu, decode_step
from kernels.decode_step.int8 import Int8Weight
from kernels.decode_step.reference import step as reference_step
from kernels.decode_step.weights import PlainWeights
from kernels.dispatch import use
from kernels.nf4 import dequantize_nf4, quantize_nf4
from tests.kernels.decode_step.model import (
    Sizes,
    forward,
    poisoned_pages,
    random_tensors,
    rounded,
    tables,
)

IMPLEMENTATIONS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not cpu.built, reason="not built")),
]
KINDS = ["float32", "bfloat16", "int8", "nf4"]
SIZES = [
    Sizes(),
    Sizes(vocabulary=1, width=1, heads=1, inner=1, blocks=1),
    Sizes(vocabulary=33, width=10, heads=2, inner=7, blocks=1),  # NF4 with less than 4 of a row in a block
    Sizes(vocabulary=64, width=64, heads=2, inner=144, blocks=1),
    Sizes(vocabulary=17, width=40, heads=1, inner=16, blocks=3),
    Sizes(vocabulary=5, width=16, heads=4, inner=8),
    Sizes(vocabulary=65, width=96, heads=1, inner=30, blocks=1),
]


def ids_of(s: Sizes, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, s.vocabulary, (length,), generator=torch.Generator().manual_seed(seed))


def prepare(s: Sizes, kind: str = "float32", **tensors: Tensor) -> DecodeWeights:
    return DecodeWeights.prepare(random_tensors(s) | tensors, head_count=s.heads, kind=kind)  # type: ignore[arg-type]


class Run:
    """Sequences whose tokens are given to the step in any portions."""

    def __init__(
        self, weights: DecodeWeights, s: Sizes, lengths: list[int], page: int = 16, threads: int = 1
    ) -> None:
        self.weights, self.threads = weights, threads
        self.table, count = tables(lengths, page)
        self.keys, self.values = poisoned_pages(s, count, page)
        self.ids = [ids_of(s, length, seed) for seed, length in enumerate(lengths)]

    def step(self, rows: list[tuple[int, int]], needs: Tensor | None = None) -> Tensor:
        """Logits of (sequence, position) rows."""
        token_ids = torch.tensor([int(self.ids[i][position]) for i, position in rows], dtype=torch.int64)
        sequences, positions = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).unbind(1)
        table = self.table[sequences]
        pages = (self.keys, self.values)
        return decode_step(self.weights, token_ids, positions, table, *pages, needs, self.threads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s", SIZES, ids=str)
def test_it_equals_the_forward_of_the_whole_sequence(implementation: str, kind: str, s: Sizes) -> None:
    length = 67
    with use(implementation):  # type: ignore[arg-type]
        weights = prepare(s, kind)
        assert (weights.panels is None) == (implementation == "torch")
        run = Run(weights, s, [length])
        actual = torch.cat(
            [run.step([(0, i) for i in range(50)]), run.step([(0, i) for i in range(50, length)])]
        )
    tensors = rounded(random_tensors(s), kind)
    assert_close_to_exact(actual, tensors, run.ids[0], s, kind if implementation == "native" else "float32")
    assert actual.dtype == torch.float32


def assert_close_to_exact(
    actual: Tensor, tensors: dict[str, Tensor], ids: Tensor, s: Sizes, kind: str
) -> None:
    """As close as float32 products are, or in 16-bit fixed point eight times closer than products with bf16.

    With int8 as close to products with bytes, where no input was near the middle between two of them.
    """
    exact, single = (forward(tensors, ids, s, dtype) for dtype in (torch.float64, torch.float32))
    half = forward(tensors, ids, s, rounding=Tensor.bfloat16)
    error, torch_error, half_error = ((x.double() - exact).abs().max() for x in (actual, single, half))
    allowed = 2 * torch_error + 1e-5
    if kind == "int8":
        in_bytes = forward(tensors, ids, s, rounding=lambda x: Int8Weight.quantize(x.float()).dequantize())
        assert (actual - in_bytes).abs().median() <= allowed
        assert error <= 2 * (in_bytes - exact).abs().max() + allowed
    else:
        assert error <= max(allowed, half_error / 8 if kind in ("bfloat16", "nf4") else 0)


def test_the_reference_runs_in_float64() -> None:
    s = Sizes()
    tensors = {name: x.double() for name, x in random_tensors(s).items()}
    plain = PlainWeights.collect(tensors, s.heads, 1e-5, None)
    ids, positions = ids_of(s, 5), torch.arange(5)
    keys, values = poisoned_pages(s, 1, 8, torch.float64)
    table = torch.zeros(5, 1, dtype=torch.int64)
    actual = reference_step(plain, ids, positions, table, keys, values, None)
    torch.testing.assert_close(actual, forward(tensors, ids, s), atol=1e-12, rtol=0)


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s", [Sizes(), Sizes(vocabulary=130, width=64, heads=2, inner=256)], ids=str)
def test_a_row_has_the_same_bits_in_any_company(kind: str, s: Sizes) -> None:
    weights, lengths = prepare(s, kind), [1, 15, 16, 17, 33, 66]
    alone = Run(weights, s, lengths)
    expected = {
        (i, position): alone.step([(i, position)])[0]
        for i, length in enumerate(lengths)
        for position in range(length)
    }
    for page, threads, chunk in ((16, 2, 148), (1, 5, 13), (3, 1, 7), (100, 3, 29)):
        run = Run(weights, s, lengths, page, threads)
        rows = [row for step in range(max(lengths)) for row in expected if row[1] == step]
        if threads % 2:
            rows = list(expected)
        for begin in range(0, len(rows), chunk):
            part = rows[begin : begin + chunk][::-1]
            for row, logits in zip(part, run.step(part), strict=True):
                assert torch.equal(logits, expected[row]), (page, threads, chunk, row)


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [96, 600])  # 600 inputs are multiplied in several stretches
def test_every_number_of_rows_gives_the_same_bits(kind: str, inner: int) -> None:
    s = Sizes(vocabulary=70, width=64, heads=2, inner=inner)
    run = Run(prepare(s, kind), s, [5] * 14)
    expected = run.step([(i, 0) for i in range(14)])
    for count in range(1, 14):
        assert torch.equal(run.step([(i, 0) for i in range(count)]), expected[:count])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_the_slots_of_the_rows_are_written(implementation: str) -> None:
    s = Sizes()
    with use(implementation):  # type: ignore[arg-type]
        run = Run(prepare(s), s, [20, 3])
        run.step([(0, i) for i in range(17)])
        before = [x.clone() for x in run.keys + run.values]
        run.step([(0, 17), (1, 0)])
    for x, old in zip(run.keys + run.values, before, strict=True):
        assert x.isnan().sum() == old.isnan().sum() - 2 * s.width
        for sequence, position in ((0, 17), (1, 0)):
            page = run.table[sequence, position // 16]
            assert not x[page, :, position % 16].isnan().any()
        assert torch.equal(x[~old.isnan()], old[~old.isnan()])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_autograd_sees_that_pages_were_written(implementation: str, inference: bool) -> None:
    s = Sizes()
    rows = ids_of(s, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)
    with use(implementation), torch.inference_mode(inference):
        pages = poisoned_pages(s, 4, 16)
        decode_step(prepare(s), *rows, *pages)
    assert all(x.is_inference() if inference else x._version > 0 for x in (*pages[0], *pages[1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_default_dtype_and_device_change_nothing(implementation: str, kind: str) -> None:
    s, before = Sizes(), torch.get_default_dtype()
    tensors, pages = random_tensors(s), poisoned_pages(s, 4, 16)
    rows = ids_of(s, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)

    def logits() -> list[Tensor]:
        weights = DecodeWeights.prepare(tensors, head_count=s.heads, kind=kind)
        return [decode_step(weights, *(x[:count] for x in rows), *pages) for count in (1, 0)]

    with use(implementation):
        expected = logits()
        try:
            torch.set_default_dtype(torch.float64)
            with torch.device("meta"):
                found = logits()
        finally:
            torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_may_share_the_pages_of_a_prefix(implementation: str) -> None:
    s = Sizes()
    with use(implementation):  # type: ignore[arg-type]
        run = Run(prepare(s), s, [32, 32])
        run.ids[1][:16] = run.ids[0][:16]
        apart = [run.step([(i, j) for j in range(20)]) for i in range(2)]
        run.table[1, 0] = run.table[0, 0]
        shared = run.step([(1, j) for j in range(16, 20)])
    torch.testing.assert_close(shared, apart[1][16:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_are_made_only_for_the_rows_that_need_them(implementation: str) -> None:
    s = Sizes()
    with use(implementation):  # type: ignore[arg-type]
        run = Run(prepare(s), s, [9, 9])
        rows = [(i % 2, i // 2) for i in range(10)]
        every = run.step(rows)
        needs = torch.tensor([i in (3, 4, 9) for i in range(20)])[::2]  # not contiguous
        assert needs.nonzero().flatten().tolist() == [2]
        assert torch.equal(run.step(rows, needs), every[needs]) or implementation == "torch"
        torch.testing.assert_close(run.step(rows, needs), every[needs], atol=1e-6, rtol=0)
        assert run.step(rows, torch.zeros(10, dtype=torch.bool)).shape == (0, s.vocabulary)
        assert run.step([]).shape == (0, s.vocabulary)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_be_bfloat16(implementation: str) -> None:
    s = Sizes()
    ids, positions = ids_of(s, 30), torch.arange(30)
    table = torch.tensor([[1, 0]], dtype=torch.int32).expand(30, 2)
    with use(implementation):  # type: ignore[arg-type]
        weights = prepare(s)
        half, full = (poisoned_pages(s, 2, 16, dtype) for dtype in (torch.bfloat16, torch.float32))
        actual = decode_step(weights, ids, positions, table, *half)
        expected = decode_step(weights, ids, positions, table, *full)
    assert torch.equal(half[0][0][1], full[0][0][1].bfloat16())  # the first block sees nothing rounded
    assert 0 < (actual - expected).abs().max() < 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_weights_are_taken_as_they_are(implementation: str) -> None:
    s = Sizes(width=64, heads=2, inner=64)
    name = "blocks.0.attention.query.weight"
    packed = quantize_nf4(random_tensors(s)[name], 32, double_quantization=False)
    with use(implementation):  # type: ignore[arg-type]
        tensors = random_tensors(s) | {name: packed}
        for kind in KINDS:  # with "float32" beside weights that are not packed
            weights = DecodeWeights.prepare(tensors, head_count=2, kind=kind)  # type: ignore[arg-type]
            run = Run(weights, s, [20])
            actual = run.step([(0, i) for i in range(20)])
            dense = random_tensors(s) | {name: dequantize_nf4(packed)}
            stored = dense | {
                key: x
                for key, x in rounded(dense, kind).items()
                if key != name or kind in ("bfloat16", "int8")
            }
            assert_close_to_exact(
                actual, stored, run.ids[0], s, kind if implementation == "native" else "float32"
            )


def test_the_same_call_gives_the_same_bits_and_leaves_weights_alone() -> None:
    s = Sizes()
    tensors = random_tensors(s)
    weights = DecodeWeights.prepare(tensors, head_count=s.heads)
    run = Run(weights, s, [8])
    first = run.step([(0, i) for i in range(8)])
    assert torch.equal(run.step([(0, i) for i in range(8)]), first)
    for name, x in random_tensors(s).items():
        assert torch.equal(x, tensors[name]), name


def test_large_numbers_stay_finite() -> None:
    s = Sizes()
    tensors = random_tensors(s)
    tensors["token_embedding.weight"] *= 1e15
    for name in ("query", "key"):
        tensors[f"blocks.0.attention.{name}.weight"] *= 1e4
    run = Run(DecodeWeights.prepare(tensors, head_count=s.heads), s, [70])
    actual = run.step([(0, i) for i in range(70)])
    assert actual.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.tensor([1, 35])}, "row 1: token id 35 is outside the vocabulary of 35"),
        ({"token_ids": torch.tensor([-1, 3])}, "row 0: token id -1"),
        ({"positions": torch.tensor([0, 70])}, "row 1: position 70 is outside the maximum context 70"),
        ({"positions": torch.tensor([-1, 0])}, "row 0: position -1"),
        ({"positions": torch.tensor([0, 32])}, "row 1: position 32 needs 3 pages, its table has 2"),
        ({"page_table": torch.tensor([[0, 1], [4, 0]])}, "row 1: its table names page 4 outside 0...3"),
        ({"page_table": torch.tensor([[-1, 1], [3, 0]])}, "row 0: its table names page -1"),
        ({"token_ids": torch.tensor([1, 2], dtype=torch.int32)}, "token_ids must be torch.int64"),
        ({"token_ids": torch.tensor([[1, 2]])}, "token_ids must be torch.int64"),
        ({"positions": torch.tensor([1])}, "positions must be torch.int64"),
        ({"page_table": torch.tensor([0, 1])}, "page_table must be int32 or int64"),
        ({"page_table": torch.tensor([[0.0], [1.0]])}, "page_table must be int32 or int64"),
        ({"needs_logits": torch.tensor([1, 0])}, "needs_logits must be torch.bool"),
        ({"key_pages": []}, "the model has 2 blocks"),
        ({"value_pages": [torch.zeros(4, 3, 8, 16).mT] * 2}, r"value_pages\[0\] must be contiguous"),
        ({"key_pages": [torch.zeros(4, 2, 16, 8)] * 2}, "pages must be floating-point"),
        ({"key_pages": [torch.zeros(4, 3, 16, 8, dtype=torch.int32)] * 2}, "pages must be floating-point"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    implementation: str, change: dict, message: str
) -> None:
    s = Sizes()
    keys, values = poisoned_pages(s, 4, 16)
    arguments = {
        "token_ids": torch.tensor([1, 2]),
        "positions": torch.tensor([0, 0]),
        "page_table": torch.tensor([[0, 1], [2, 3]]),
        "key_pages": keys,
        "value_pages": values,
    }
    with use(implementation), pytest.raises(ValueError, match=message):  # type: ignore[arg-type]
        decode_step(prepare(s), **(arguments | change))
    assert all(x.isnan().all() for x in keys + values)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"blocks.1.attention.key.bias": None}, {}, "lack 'blocks.1.attention.key.bias'"),
        ({"blocks.0.attention.key.lora_a.weight": torch.zeros(2, 24)}, {}, "merge adapters"),
        ({"final_norm.scale": torch.zeros(23)}, {}, r"final_norm.scale must be \[24\]"),
        ({}, {"head_count": 5}, "5 heads do not divide the width 24"),
        ({}, {"layer_norm_epsilon": 0.0}, "epsilon"),
        ({}, {"layer_norm_epsilon": math.nan}, "epsilon"),
        ({}, {"kind": "float16"}, "kind must be one of float32, bfloat16, int8, nf4"),
        ({"token_embedding.weight": quantize_nf4(torch.ones(35, 24))}, {}, "only the weights of linear"),
    ],
)
def test_weights_that_are_no_model_are_refused(change: dict, options: dict, message: str) -> None:
    s = Sizes()
    tensors = {name: x for name, x in (random_tensors(s) | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        DecodeWeights.prepare(tensors, **({"head_count": s.heads} | options))


@pytest.mark.skipif(not cpu.built, reason="not built")
def test_packed_weights_do_not_run_in_torch_in_silence() -> None:
    run = Run(prepare(Sizes()), Sizes(), [2])
    with use("torch"), pytest.raises(ValueError, match="prepare them under"):
        run.step([(0, 0)])


@pytest.mark.skipif(not cpu.built, reason="not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [16, 64, 80, 256])
@pytest.mark.parametrize("value", [0.0, 1e-38, 0.31, -7.3, 3e30, math.nan, math.inf])
def test_equal_factors_of_any_size_give_the_product(kind: str, width: int, value: float) -> None:
    s = Sizes(width=width, heads=2, blocks=1)
    last = {"scale": torch.zeros(width), "bias": torch.full((width,), value)}  # what goes into the head
    changes = {f"final_norm.{name}": x for name, x in last.items()}
    changes["language_model_head.weight"] = torch.full((s.vocabulary, width), 0.625)  # exact in every kind
    changes["language_model_head.bias"] = torch.zeros(s.vocabulary)
    weights = prepare(s, kind, **changes)
    for rows in (1, 9):
        logits = Run(weights, s, [rows]).step([(0, i) for i in range(rows)])
        if math.isfinite(value):
            torch.testing.assert_close(
                logits, torch.full_like(logits, width * value * 0.625), rtol=1e-4, atol=1e-30
            )
        else:
            assert not logits.isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_weights_do_not_follow_the_tensors_that_they_were_made_of(kind: str, implementation: str) -> None:
    s = Sizes()
    tensors = random_tensors(s)
    with use(implementation):  # type: ignore[arg-type]
        weights = DecodeWeights.prepare(tensors, head_count=s.heads, kind=kind)  # type: ignore[arg-type]
        before = Run(weights, s, [5]).step([(0, i) for i in range(5)])
        for tensor in tensors.values():
            tensor.zero_()
        after = Run(weights, s, [5]).step([(0, i) for i in range(5)])
    assert torch.equal(before, after)
