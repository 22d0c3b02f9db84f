"""Flash attention, every implementation, against the definition in float64 and torch's own operator."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import flash_attention
from kernels.flash_attention import cpu
from kernels.native import Integer
from kernels.operators import flop_counter
from tests.kernels.cases import virtual
from tests.kernels.flash_attention.running import HAS_BF16, IMPLEMENTATIONS, among_nan, operands, running

Tensors = list[torch.Tensor]

# batch, heads, queries, keys, width: around the blocks of 48, 96 and 128 (native), 32, 64 and 128 (Triton)
SMALL = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 5, 4),
    (1, 2, 5, 6, 40),
    (1, 1, 1, 65, 8),
    (1, 1, 33, 34, 24),
    (1, 1, 17, 35, 80),
]
LARGE = [
    (1, 2, 47, 47, 32),
    (1, 2, 48, 48, 72),
    (2, 2, 49, 49, 64),
    (1, 1, 97, 97, 96),
    (1, 1, 129, 129, 128),
]
LARGE += [(1, 3, 257, 257, 32), (1, 1, 100, 331, 16), (2, 3, 41, 41, 16), (1, 2, 13, 22, 9)]
CASES = [
    *itertools.product(["torch", "native", "half"], SMALL + LARGE, [torch.float32, torch.bfloat16]),
    *itertools.product(["triton"], [*SMALL, (1, 1, 65, 65, 16)], [torch.float32]),
    *itertools.product(["triton"], [*SMALL[2:4], (1, 1, 130, 130, 16)], [torch.bfloat16]),
]
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
HALF_ERROR = 2**-6  # of a sum of products of two numbers with 8 bits each


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def problem(shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32) -> Tensors:
    """q, k, v and an upstream gradient."""
    batch, heads, queries, keys, width = shape
    q, k = (batch, heads, queries, width), (batch, heads, keys, width)
    return draw(q, k, k, q, dtype=dtype)


def attend(inputs: Tensors, document_starts: torch.Tensor | None = None) -> Tensors:
    """The output and the gradients of q, k and v."""
    q, k, v, upstream = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, document_starts=document_starts, operands=operands())
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def definition(inputs: Tensors, seen: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """torch's own operator with a mask `[..., Tq, Tk]`; every row must see something."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
    out = scaled_dot_product_attention(*leaves, attn_mask=seen)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(dtype))]


def causal(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def assert_accurate(actual: Tensors, inputs: Tensors, seen: torch.Tensor) -> None:
    exact = definition(inputs, seen, torch.float64)
    peer = definition(inputs, seen, inputs[0].dtype)
    for factor, ours, theirs, right in zip([2, 3, 3, 3], actual, peer, exact, strict=True):
        allowed = factor * (theirs - right).abs().max() + EPSILON[ours.dtype]
        if operands() == "half":
            allowed += HALF_ERROR * right.abs().max()
        assert (ours - right).abs().max() <= allowed


@pytest.mark.parametrize(("implementation", "shape", "dtype"), CASES)
def test_errors_are_those_of_torch(implementation, shape, dtype) -> None:
    inputs = problem(shape, dtype)
    with running(implementation):
        actual = attend(inputs)
        assert all(x.dtype == dtype for x in actual)
        assert_accurate(actual, inputs, causal(shape[2], shape[3]))


@pytest.mark.skipif(not HAS_BF16, reason="this CPU does not multiply bf16")
def test_half_factors_are_bf16() -> None:
    """Large errors that float32 would not have, and none where all factors are bf16 numbers already."""
    inputs = problem((1, 2, 64, 64, 16))
    with running("native"):
        full = attend(inputs)
    with running("half"):
        half = attend(inputs)
    for a, b in zip(half, full, strict=True):
        assert 2**-11 < (a - b).norm() / b.norm() < 2**-7
    alone = [x[:, :, :1].bfloat16().float() for x in inputs]  # its probability is 1
    with running("half"):
        assert torch.equal(attend(alone)[0], alone[2])


@pytest.mark.skipif(HAS_BF16, reason="this CPU multiplies bf16")
def test_half_factors_are_whole_where_the_cpu_has_none() -> None:
    inputs = problem((1, 2, 64, 64, 16))
    with running("native"):
        out = flash_attention(*inputs[:3], operands="half")
        assert torch.equal(out, attend(inputs)[0])


def test_half_factors_of_float32_are_those_of_bf16_in_triton() -> None:
    inputs = problem((1, 2, 33, 33, 16))
    with running("triton"):
        rounded = attend([x.bfloat16() for x in inputs])
        leaves = [x.requires_grad_() for x in inputs[:3]]
        out = flash_attention(*leaves, operands="half")
        found = [out, *torch.autograd.grad(out, leaves, inputs[3])]
    assert all(x.dtype == torch.float32 for x in found)
    assert torch.equal(out, rounded[0].float())
    for ours, right in zip(found[1:], rounded[1:], strict=True):
        assert torch.equal(ours, right.float())


def test_operands_are_full_or_half() -> None:
    with pytest.raises(ValueError, match="operands must be full or half, got 'int8'"):
        flash_attention(*problem((1, 1, 2, 2, 4))[:3], operands="int8")


def test_float64_is_exact() -> None:
    inputs = problem((1, 2, 9, 300, 5), torch.float64)
    exact = definition(inputs, causal(9, 300), torch.float64)
    for ours, right in zip(attend(inputs), exact, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-13, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys"), [(7, 1), (64, 33), (3, 0)])
def test_rows_that_see_no_key_give_zero_and_finite_gradients(implementation, queries, keys) -> None:
    inputs = problem((1, 2, queries, keys, 8))
    blind = queries - keys
    with running(implementation):
        actual = attend(inputs)
        _, lse = torch.ops.riftco.flash_attention(*inputs[:3], None, operands())
    assert (lse[:, :, :blind] == -math.inf).all()
    assert lse[:, :, blind:].isfinite().all()
    assert not actual[0][:, :, :blind].any()
    assert not actual[1][:, :, :blind].any()
    assert all(x.isfinite().all() for x in actual)
    if keys:
        seeing = [x[:, :, blind:] if i in (0, 3) else x for i, x in enumerate(inputs)]
        visible = [x[:, :, blind:] if i < 2 else x for i, x in enumerate(actual)]
        with running(implementation):
            assert_accurate(visible, seeing, causal(keys, keys))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_log_sum_exp_is_that_of_the_scores(implementation) -> None:
    q, k, v, _ = problem((1, 2, 33, 40, 8))
    with running(implementation):
        _, lse = torch.ops.riftco.flash_attention(q, k, v, None, "full")
    scores = (q.double() @ k.double().mT / math.sqrt(8)).masked_fill(~causal(33, 40), -math.inf)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [((70,), (1, 69)), ((3, 30, 37), (64, 6)), ((33, 36, 1), (40, 30))])
def test_documents_do_not_see_each_other(implementation, dtype, lengths) -> None:
    inputs = problem((2, 1, 70, 70, 16))
    starts = torch.stack([_starts(row) for row in lengths])
    position = torch.arange(70)
    seen = causal(70, 70) & (position >= starts[:, None, :, None])
    with running(implementation):
        assert_accurate(attend(inputs, starts.to(dtype)), inputs, seen)


def _starts(lengths: tuple[int, ...]) -> torch.Tensor:
    first = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    return first.repeat_interleave(torch.tensor(lengths))


@pytest.mark.parametrize("implementation", ["torch", "native", "half"])
def test_many_documents_over_many_blocks(implementation) -> None:
    inputs = problem((1, 2, 400, 400, 32))
    starts = _starts((1, 130, 7, 96, 48, 118))[None]
    seen = causal(400, 400) & (torch.arange(400) >= starts[:, None, :, None])
    with running(implementation):
        assert_accurate(attend(inputs, starts), inputs, seen)


@pytest.mark.parametrize("implementation", ["native", "half"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_of_a_row_has_the_bits_that_it_has_alone(implementation, threads, dtype) -> None:
    rows = ((50, 1, 130, 7), (188,))
    inputs = [heads_last(x) for x in problem((2, 3, 188, 188, 24), dtype)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with running(implementation):
            together = attend(inputs, torch.stack([_starts(lengths) for lengths in rows]))
            for row, lengths in enumerate(rows):
                ends = list(itertools.accumulate(lengths))
                for begin, end in zip([0, *ends], ends, strict=False):
                    alone = attend([x[row : row + 1, :, begin:end] for x in inputs])
                    for found, expected in zip(together, alone, strict=True):
                        assert torch.equal(found[row : row + 1, :, begin:end], expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_starts_beyond_the_own_position_hide_everything(implementation) -> None:
    inputs = problem((1, 1, 5, 5, 4))
    with running(implementation):
        out, *gradients = attend(inputs, torch.tensor([[9, 0, -3, 3, 4]]))
    assert not out[:, :, 0].any()
    assert out[:, :, 1:].abs().amin() > 0
    assert all(x.isfinite().all() for x in gradients)


def permuted(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)


def every_other(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]


def heads_last(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def concatenated(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(x, math.nan), x], 1)[:, x.shape[1] :]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", [permuted, every_other, heads_last, concatenated, among_nan])
def test_layouts_of_inputs_and_gradients_do_not_matter(implementation, layout) -> None:
    inputs = problem((2, 3, 9, 9, 24))
    with running(implementation):
        expected, actual = attend(inputs), attend([layout(x) for x in inputs])
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-6 if implementation == "torch" else 0, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("turn", range(4))
def test_every_tensor_has_strides_of_its_own(implementation, turn) -> None:
    inputs = problem((2, 3, 9, 9, 24))
    layouts = [permuted, every_other, heads_last, among_nan]
    with running(implementation):
        expected = attend(inputs)
        actual = attend([layouts[(i + turn) % 4](x) for i, x in enumerate(inputs)])
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-6 if implementation == "torch" else 0, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 4), (1, 3, 9, 1)])
def test_expanded_gradients(implementation, shape) -> None:
    inputs = problem((2, 3, 9, 9, 4))
    upstream = draw(shape)[0].expand(2, 3, 9, 4)
    with running(implementation):
        expected, actual = attend([*inputs[:3], upstream.contiguous()]), attend([*inputs[:3], upstream])
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-6 if implementation == "torch" else 0, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_overflowing_scores_stay_finite(implementation, dtype) -> None:
    q, k, v, upstream = problem((1, 1, 9, 9, 8), dtype)
    for factor in (3e2, 1e4):
        with running(implementation):
            actual = attend([q * factor, k * factor, v, upstream])
        assert all(x.isfinite().all() for x in actual)
        exact = definition([q * factor, k * factor, v, upstream], causal(9, 9), torch.float64)
        torch.testing.assert_close(actual[0].double(), exact[0], atol=0.02, rtol=0)
        torch.testing.assert_close(actual[3].double(), exact[3], atol=0.04, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_stays_in_the_rows_that_see_it(implementation) -> None:
    q, k, v, upstream = problem((1, 1, 9, 9, 8))
    q[0, 0, 4, 3] = math.nan
    with running(implementation):
        out, dq, _, _ = attend([q, k, v, upstream])
    for x in (out, dq):
        assert x[:, :, 4].isnan().all()
        assert x[:, :, [0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_subset_of_inputs_may_want_gradients(implementation) -> None:
    inputs = problem((1, 1, 5, 5, 4))
    with running(implementation):
        expected = attend(inputs)[1:]
        for wanted in itertools.product([False, True], repeat=3):
            leaves = [x.clone().requires_grad_(wants) for x, wants in zip(inputs, wanted, strict=False)]
            out = flash_attention(*leaves, operands=operands())
            assert out.requires_grad == any(wanted)
            if any(wanted):
                out.backward(inputs[3])
            for leaf, wants, right in zip(leaves, wanted, expected, strict=True):
                assert torch.equal(leaf.grad, right) if wants else leaf.grad is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs_stay_and_the_same_bits_come_twice(implementation) -> None:
    inputs = problem((1, 2, 70, 70, 8))
    before = [x.clone() for x in inputs]
    with running(implementation):
        first, second = attend(inputs), attend(inputs)
    assert all(map(torch.equal, inputs, before))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("implementation", ["native", "half"])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_change_a_bit(implementation, heads, dtype) -> None:
    inputs, threads = problem((1, heads, 200, 250, 24), dtype), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with running(implementation):
                results.append(attend(inputs))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 3, 4), (1, 0, 3, 3, 4), (1, 2, 0, 3, 4), (1, 2, 0, 0, 4)])
def test_nothing_is_something(implementation, shape) -> None:
    inputs = problem(shape)
    with running(implementation):
        out, dq, dk, dv = attend(inputs)
    assert out.shape == dq.shape == inputs[0].shape
    assert not dk.any()
    assert not dv.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_beyond_32_bits(implementation) -> None:
    q, k, v, upstream = problem((1, 2, 5, 5, 8), torch.bfloat16)
    room = virtual(2**31 + 100, torch.bfloat16)
    far = room.as_strided(q.shape, (0, 2**31, 8, 1)).copy_(q)
    with running(implementation):
        expected = attend([q, k, v, upstream])
        for where in range(4):
            far.copy_([q, k, v, upstream][where])
            actual = attend([far if i == where else x for i, x in enumerate([q, k, v, upstream])])
            assert all(map(torch.equal, actual, expected))


def test_memory_grows_linearly() -> None:
    assert _allocated(1024) < 2.2 * _allocated(512)


def _allocated(length: int) -> int:
    inputs = problem((1, 2, length, length, 32))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        attend(inputs)
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.function_events)


def test_it_passes_opcheck() -> None:
    q, k, v, _ = (permuted(x).requires_grad_() for x in problem((2, 3, 5, 5, 4)))
    starts = _starts((2, 3)).repeat(2, 1)
    for document_starts in (None, starts):
        torch.library.opcheck(torch.ops.riftco.flash_attention.default, (q, k, v, document_starts, "half"))
    saved = [x.detach() for x in (q, q, k, v, *torch.ops.riftco.flash_attention(q, k, v, starts, "half"))]
    torch.library.opcheck(torch.ops.riftco.flash_attention_backward.default, (*saved, starts, "half"))


def test_it_compiles_without_a_break() -> None:
    inputs = problem((1, 2, 9, 9, 8))
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = compiled(*leaves)
    expected = attend(inputs)
    assert torch.equal(out, expected[0])
    for ours, right in zip(torch.autograd.grad(out, leaves, inputs[3]), expected[1:], strict=True):
        assert torch.equal(ours, right)


def test_operations_are_counted() -> None:
    q, k, v, upstream = problem((2, 3, 4, 6, 8))
    with flop_counter(display=False) as counter:
        attend([q, k, v, upstream])
    pairs = 3 + 4 + 5 + 6
    assert counter.get_total_flops() == 2 * 3 * pairs * 8 * (4 + 10)


def test_heads_merge_without_a_copy() -> None:
    q, k, v, _ = problem((2, 3, 4, 4, 8))
    out = flash_attention(q, k, v)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


Q = torch.zeros(2, 3, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q[0], Q, Q), "q and k must be .*B, H, T, d.*3, 4, 8"),
        ((Q[..., :0], Q[..., :0], Q[..., :0]), "d >= 1"),
        ((Q, Q[:1], Q), r"k must be torch.float32 \[2, 3, 4, 8\].*got .*\[1, 3, 4, 8\]"),
        ((Q, Q, Q[..., :4]), r"v must be .*\[2, 3, 4, 4\]"),
        ((Q, Q.bfloat16(), Q), "k must be torch.float32 .*got torch.bfloat16"),
        ((Q.half(), Q.half(), Q.half()), "float16; convert"),
        ((Q, Q, Q.to("meta")), "on cpu as q is, got .* on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*arguments)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), r"int32 or int64 \[2, 4\], got torch.int64 \[2, 5\]"),
        (torch.zeros(2, 4), "got torch.float32"),
        (torch.zeros(2, 4, dtype=torch.int64, device="meta"), "on cpu as q is, got meta"),
    ],
)
def test_document_starts_that_do_not_fit_are_refused(starts, message) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(Q, Q, Q, document_starts=starts)


def test_document_starts_need_as_many_queries_as_keys() -> None:
    with pytest.raises(ValueError, match="as many queries as keys, got 2 and 4"):
        flash_attention(Q[:, :, :2], Q, Q, document_starts=torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.skipif(not cpu.built, reason="no native code for this machine was built")
def test_scratch_may_take_more_than_32_bits() -> None:
    for _, scratch_size in (cpu._forward, cpu._backward):
        assert scratch_size((Integer * 5)(1, 1, 1, 2**25, 128), 0) >= 2 * 2**25 * 128
