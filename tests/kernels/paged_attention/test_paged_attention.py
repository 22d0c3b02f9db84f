"""Paged attention, every implementation, against contiguous attention in float64.

What nobody wrote in the pages is NaN.
"""

import math

import pytest
import torch

from kernels import paged_attention
from kernels.native import pointer
from kernels.paged_attention import cpu
from tests.kernels.cases import virtual
from tests.kernels.flash_attention.running import IMPLEMENTATIONS, among_nan, running

HEADS, PAGE = 2, 16
LENGTHS = [1, 15, 16, 17, 33, 64, 65]


class Sequences:
    """Random sequences, contiguous and in pages of NaN, at random places."""

    def __init__(self, lengths: list[int], width: int = 8, page: int = PAGE, dtype=torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(width)
        self.lengths, self.page = lengths, page
        used = [-(-length // page) for length in lengths]
        places = torch.randperm(sum(used) + 3, generator=self.generator)
        self.table = torch.full((len(lengths), max(used, default=0) + 1), 10**6)  # a page that is not there
        self.key_pages = torch.full((len(places), HEADS, page, width), math.nan, dtype=dtype)
        self.value_pages = self.key_pages.clone()
        self.keys, self.values, self.q = [], [], []
        for s, length in enumerate(lengths):
            begin = sum(used[:s])
            self.table[s, : used[s]] = places[begin : begin + used[s]]
            for tensors, pages in ((self.keys, self.key_pages), (self.values, self.value_pages)):
                tensors.append(self.draw(HEADS, length, width, dtype=dtype))
                for logical, part in enumerate(tensors[-1].split(page, 1)):
                    pages[self.table[s, logical], :, : part.shape[1]] = part
            self.q.append(self.draw(HEADS, length, width, dtype=dtype))

    def draw(self, *shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def newest(self, count: int) -> torch.Tensor:
        """The last queries of each sequence, `[S, H, count, d]`."""
        return torch.stack([q[:, -count:] for q in self.q])

    def attend(self, count: int) -> torch.Tensor:
        return paged_attention(
            self.newest(count), self.key_pages, self.value_pages, self.table, torch.tensor(self.lengths)
        )

    def definition(self, s: int, count: int, dtype=torch.float64) -> torch.Tensor:
        q, k, v = (x[s][None].to(dtype) for x in (self.q, self.keys, self.values))
        length = self.lengths[s]
        seen = torch.ones(length, length, dtype=torch.bool).tril()[-count:] if count else None
        return torch.nn.functional.scaled_dot_product_attention(
            q[:, :, length - count :], k, v, attn_mask=seen
        )[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "page", "count"), [(8, 16, 1), (24, 5, 1), (33, 64, 1), (40, 16, 16), (6, 3, 20)]
)
def test_errors_are_those_of_contiguous_attention(implementation, dtype, width, page, count) -> None:
    lengths = [length for length in LENGTHS if length >= count]
    if implementation == "triton":
        lengths = lengths[-2:]
    sequences = Sequences(lengths, width, page, dtype)
    with running(implementation):
        actual = sequences.attend(count)
    assert actual.dtype == dtype
    for s in range(len(lengths)):
        exact, peer = sequences.definition(s, count), sequences.definition(s, count, dtype)
        allowed = 2 * (peer - exact).abs().max() + (1e-6 if dtype == torch.float32 else 1e-3)
        assert (actual[s] - exact).abs().max() <= allowed


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_may_have_fewer_new_tokens_than_others(implementation) -> None:
    sequences = Sequences([20, 18, 33, 1], 8)
    counts = [3, 0, 18, 1]
    q = torch.full((4, HEADS, 18, 8), math.nan)
    for s, count in enumerate(counts):
        q[s, :, :count] = sequences.q[s][:, sequences.lengths[s] - count :]
    with running(implementation):
        actual = paged_attention(
            q,
            sequences.key_pages,
            sequences.value_pages,
            sequences.table,
            torch.tensor(sequences.lengths),
            counts=torch.tensor(counts),
        )
    for s, count in enumerate(counts):
        torch.testing.assert_close(
            actual[s, :, :count].double(), sequences.definition(s, count), atol=1e-6, rtol=0
        )
        assert not actual[s, :, count:].any()


@pytest.mark.parametrize("implementation", ["native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 12, 48, 64, 100])
def test_a_chunk_gives_the_bits_of_its_tokens_one_by_one(implementation, dtype, width) -> None:
    sequences = Sequences([67], width, dtype=dtype)
    count = 67 if implementation == "native" else 18
    with running(implementation):
        together = sequences.attend(count)
        for i in range(0, count, 1 if implementation == "native" else 4):
            length = 67 - count + i + 1
            alone = paged_attention(
                sequences.newest(count)[:, :, i : i + 1],
                sequences.key_pages,
                sequences.value_pages,
                sequences.table[0, : -(-length // PAGE)],
                length,
            )
            # Interpreted products are numpy's, in which the place of a row can matter.
            atol = 1e-6 if implementation == "triton" and dtype == torch.float32 else 0
            torch.testing.assert_close(alone[0, :, 0], together[0, :, i], atol=atol, rtol=0)


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_other_sequences_do_not_change_a_bit(implementation) -> None:
    sequences = Sequences([33, 5, 70], 16)
    with running(implementation):
        together = sequences.attend(1)
        for s, length in enumerate(sequences.lengths):
            alone = paged_attention(
                sequences.newest(1)[s : s + 1],
                sequences.key_pages,
                sequences.value_pages,
                sequences.table[s : s + 1],
                torch.tensor([length]),
            )
            assert torch.equal(alone[0], together[s])


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_the_page_size_does_not_change_a_bit(implementation) -> None:
    small, large = Sequences([70, 41], 16, page=7), Sequences([70, 41], 16, page=128)
    for name in ("q", "keys", "values"):
        setattr(large, name, getattr(small, name))
    for pages, tensors in ((large.key_pages, large.keys), (large.value_pages, large.values)):
        for s, x in enumerate(tensors):
            pages[large.table[s, 0], :, : x.shape[1]] = x
    with running(implementation):
        assert torch.equal(small.attend(2), large.attend(2))


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    sequences, threads = Sequences([900, 300, 1024, 7], 64), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with running("native"):
                results.append(sequences.attend(7))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_may_share_pages(implementation) -> None:
    sequences = Sequences([40], 8)
    table = sequences.table.repeat(3, 1)
    table[1, 2] = table[0, 1]  # another last page
    lengths = torch.tensor([40, 40, 33])
    with running(implementation):
        shared = paged_attention(
            sequences.newest(1).repeat(3, 1, 1, 1),
            sequences.key_pages,
            sequences.value_pages,
            table,
            lengths,
        )
        assert torch.equal(shared[0], sequences.attend(1)[0])
    for s, rows in ((1, [*range(32), *range(16, 24)]), (2, [*range(33)])):
        q, k, v = (x[0].double() for x in (sequences.newest(1), sequences.keys, sequences.values))
        weights = (q @ k[:, rows].mT / math.sqrt(8)).softmax(-1)
        torch.testing.assert_close(shared[s].double(), weights @ v[:, rows], atol=1e-6, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_layouts_and_integer_types_do_not_matter(implementation, dtype) -> None:
    sequences = Sequences([33, 20], 24)
    q = sequences.newest(3)
    lengths = torch.tensor([33, 0, 20, 0])[::2]
    wide = torch.stack([sequences.table, torch.full_like(sequences.table, -7)], -1).to(dtype)[..., 0]

    def heads_inside(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def widths_outside(x: torch.Tensor) -> torch.Tensor:
        return x.mT.contiguous().mT

    with running(implementation):
        expected = sequences.attend(3)
        for change in (heads_inside, among_nan, widths_outside):
            pages = (change(sequences.key_pages), change(sequences.value_pages))
            actual = paged_attention(change(q), *pages, wide, lengths)
            atol = 1e-6 if implementation == "torch" else 0
            torch.testing.assert_close(actual, expected, atol=atol, rtol=0)
        mixed = (widths_outside(sequences.key_pages), among_nan(sequences.value_pages))
        torch.testing.assert_close(
            paged_attention(q, *mixed, wide, lengths),
            expected,
            atol=1e-6 if implementation == "torch" else 0,
            rtol=0,
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs_stay_and_the_same_bits_come_twice(implementation) -> None:
    sequences = Sequences([33, 20], 8)
    before = [x.clone() for x in (sequences.key_pages, sequences.value_pages, sequences.table)]
    with running(implementation):
        assert torch.equal(sequences.attend(2), sequences.attend(2))
    for x, y in zip((sequences.key_pages, sequences.value_pages, sequences.table), before, strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_overflowing_scores_stay_finite(implementation, dtype) -> None:
    sequences = Sequences([70], 8, dtype=dtype)
    sequences.q[0] *= 1e4
    sequences.keys[0] *= 1e4
    sequences.key_pages *= 1e4
    with running(implementation):
        actual = sequences.attend(2)
    torch.testing.assert_close(actual[0].double(), sequences.definition(0, 2), atol=0.02, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_beyond_32_bits(implementation) -> None:
    sequences = Sequences([20], 8, dtype=torch.bfloat16)
    table = torch.tensor([[2**23 + 5, 2**23 + 9]])  # a page is 256 numbers: these lie beyond 2^31
    pages = []
    for near in (sequences.key_pages, sequences.value_pages):
        room = virtual((2**23 + 10) * 256, torch.bfloat16)
        pages.append(room.view(-1, HEADS, PAGE, 8))
        pages[-1][table[0]] = near[sequences.table[0, :2]]
    with running(implementation):
        actual = paged_attention(sequences.newest(1), *pages, table, torch.tensor([20]))
        assert torch.equal(actual, sequences.attend(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_nothing_is_something(implementation, shape) -> None:
    sequences = Sequences([5, 3], 8)
    q = torch.zeros(shape[0], HEADS, shape[1], 8)
    with running(implementation):
        out = paged_attention(
            q,
            sequences.key_pages,
            sequences.value_pages,
            sequences.table[: shape[0]],
            torch.tensor([5, 3][: shape[0]], dtype=torch.int64),
        )
    assert out.shape == q.shape


@pytest.mark.skipif(not cpu.built, reason="no native code for this machine was built")
def test_scratch_is_float32_whatever_torchs_default(monkeypatch) -> None:
    taken, before = [], torch.get_default_dtype()
    monkeypatch.setattr(cpu, "pointer", lambda x: taken.append(x) or pointer(x))
    sequences = Sequences([20])
    try:
        torch.set_default_dtype(torch.bfloat16)
        sequences.attend(1)
    finally:
        torch.set_default_dtype(before)
    assert {x.dtype for x in taken if x is not None} == {torch.int64, torch.float32}


def test_it_passes_opcheck() -> None:
    sequences = Sequences([20, 18], 8)
    q = sequences.newest(2).mT.contiguous().mT
    lengths = torch.tensor([20, 18])
    sequences.key_pages.nan_to_num_()
    sequences.value_pages.nan_to_num_()
    for counts in (None, torch.tensor([2, 1])):
        arguments = (q, sequences.key_pages, sequences.value_pages, sequences.table, lengths, counts)
        torch.library.opcheck(torch.ops.riftco.paged_attention.default, arguments)


def test_it_compiles_without_a_break() -> None:
    sequences = Sequences([20, 18], 8)
    lengths = torch.tensor([20, 18])
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    arguments = (sequences.newest(2), sequences.key_pages, sequences.value_pages, sequences.table, lengths)
    assert torch.equal(compiled(*arguments), paged_attention(*arguments))


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize(
    ("table", "lengths", "counts", "message"),
    [
        ([[0, 1], [1, 7]], [20, 17], [1, 1], "sequence 1: its table names page 7 outside 0...2"),
        ([[0, -1], [1, 0]], [20, 17], [1, 1], "sequence 0: its table names page -1 outside 0...2"),
        ([[0, 1], [1, 0]], [20, 33], [1, 1], "sequence 1: 33 tokens need 3 pages, the table has 2"),
        ([[0, 1], [1, 0]], [20, 2**63 - 1], [1, 1], f"sequence 1: {2**63 - 1} tokens need {2**59} pages"),
        (
            [[0, 1], [1, 0]],
            [20, 1],
            [1, 2],
            "sequence 1: 2 queries cannot be the last of 1 visible tokens; len",
        ),
        ([[0, 1], [1, 0]], [20, 17], [1, 3], "sequence 1: count must be 0 to 2, as many as q has, got 3"),
        ([[0, 1], [1, 0]], [20, 17], [-1, 1], "sequence 0: count must be 0 to 2, as many as q has, got -1"),
    ],
)
def test_values_that_do_not_fit_are_refused(implementation, table, lengths, counts, message) -> None:
    pages = torch.zeros(3, HEADS, PAGE, 8)
    numbers = [torch.tensor(x) for x in (table, lengths, counts)]
    with running(implementation), pytest.raises(ValueError, match=message):
        paged_attention(torch.zeros(2, HEADS, 2, 8), pages, pages, *numbers[:2], counts=numbers[2])


@pytest.mark.parametrize("page", [-3, 5, 2**40])
def test_pages_that_are_not_there_count_as_unseen_on_a_gpu(page) -> None:
    sequences = Sequences([30], 8)
    sequences.table[0, 1] = page
    with running("triton"):
        actual = sequences.attend(1)
    q, k, v = (x[0].double() for x in (sequences.newest(1), sequences.keys, sequences.values))
    expected = (q @ k[:, :16].mT / math.sqrt(8)).softmax(-1) @ v[:, :16]
    torch.testing.assert_close(actual[0].double(), expected, atol=1e-6, rtol=0)


Q, PAGES, TABLE, LENGTH = (
    torch.zeros(1, 2, 1, 8),
    torch.zeros(3, 2, 16, 8),
    torch.zeros(1, 2).long(),
    torch.ones(1).long(),
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q[0], PAGES, PAGES, TABLE, LENGTH), r"q must be \[S, H, n, d\]"),
        ((Q.half(), PAGES.half(), PAGES.half(), TABLE, LENGTH), "float16; convert"),
        (
            (Q, PAGES[:, :1], PAGES, TABLE, LENGTH),
            r"key_pages must be .*\[3, 2, 16, 8\].*got .*\[3, 1, 16, 8\]",
        ),
        ((Q, PAGES, PAGES.double(), TABLE, LENGTH), "value_pages must be torch.float32 .*got torch.float64"),
        ((Q, PAGES[:, :, :0], PAGES[:, :, :0], TABLE, LENGTH), "at least one token"),
        (
            (Q, PAGES, PAGES, TABLE[0], LENGTH),
            r"page_table must be .*\[1, max_pages\], got torch.int64 \[2\]",
        ),
        ((Q, PAGES, PAGES, TABLE.float(), LENGTH), "got torch.float32"),
        ((Q, PAGES, PAGES, TABLE, LENGTH.int()), r"lengths must be int64 \[1\], got torch.int32 \[1\]"),
        ((Q, PAGES, PAGES, TABLE, LENGTH.to("meta")), "lengths must be on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments)


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts must be int64 \[1\], got torch.int64 \[2\]"):
        paged_attention(Q, PAGES, PAGES, TABLE, LENGTH, counts=torch.ones(2, dtype=torch.int64))
