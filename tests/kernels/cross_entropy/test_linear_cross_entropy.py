"""The head's product and the loss in one: every implementation against the definition in float64."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cross_entropy import (
    _linear_cross_entropy,
    chunks,
    cpu,
    linear_cross_entropy,
    reference,
    triton_cross_entropy,
)
from kernels.linear import cpu as linear_cpu
from kernels.linear.reference import has_matrix_units
from kernels.operands import in_bytes
from kernels.operators import flop_counter
from tests.kernels.cases import (
    DTYPES,
    IMPLEMENTATIONS,
    LAYOUTS,
    assert_as_exact_as,
    bits,
    leaves,
    random,
    running,
)
from tests.kernels.cross_entropy.test_cross_entropy import mask_for

NAMES = ("dx", "dweight", "dbias")
SIZES = [(1, 1, 1), (3, 5, 7), (4, 16, 16), (5, 8, 17), (9, 24, 31)]  # of N, D, V; chunks hold 4 rows


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    if request.param == "native" and cpu._in_place is None:
        pytest.skip("no native code was built")
    monkeypatch.setattr(triton_cross_entropy, "BLOCK", 16)
    rows_of_a_chunk(monkeypatch, 4)
    with running(request.param):
        yield request.param


def rows_of_a_chunk(monkeypatch, count: int) -> None:
    monkeypatch.setattr(chunks, "FEWEST_ROWS", count)
    monkeypatch.setattr(chunks, "CPU_BYTES", 0)


def inputs(
    n: int, d: int, v: int, dtype: torch.dtype = torch.float32, biased: bool = True
) -> list[Tensor | None]:
    return [
        random(n, d, dtype=dtype),
        random(v, d, seed=1, dtype=dtype),
        random(v, seed=2, dtype=dtype) if biased else None,
    ]


def targets_for(n: int, v: int) -> Tensor:
    return torch.randint(v, (n,), generator=torch.Generator().manual_seed(7))


def separate(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None, reduction: str
) -> Tensor:
    kept = targets if mask is None else targets.masked_fill(~mask, -100)
    logits = functional.linear(x, weight, bias).flatten(0, -2)
    return functional.cross_entropy(logits, kept.flatten(), reduction=reduction)


def check(given, targets: Tensor, mask: Tensor | None = None, reduction="mean", upstream=1.0) -> list[Tensor]:
    """Our loss and gradients, held against torch's own and float64."""
    kinds = [leaves(*given), leaves(*given), leaves(*given, dtype=torch.float64)]
    losses = [linear_cross_entropy(*kinds[0], targets, mask=mask, reduction=reduction)]
    losses += [separate(*kind, targets, mask, reduction) for kind in kinds[1:]]
    assert losses[0].dtype == torch.float32
    assert_as_exact_as(*losses, 2, "loss")
    for loss in losses:
        (loss * upstream).backward()
    for name, *found in zip(NAMES, *kinds, strict=True):
        if found[0] is not None:
            assert found[0].grad.dtype == found[0].dtype
            assert_as_exact_as(*(leaf.grad for leaf in found), 3, name)
    return [losses[0].detach(), *(leaf.grad for leaf in kinds[0] if leaf is not None)]


@pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_loss_and_gradients_are_as_exact_as_torchs(implementation, sizes, dtype, biased) -> None:
    targets = targets_for(sizes[0], sizes[2])
    check(inputs(*sizes, dtype, biased), targets)
    check(inputs(*sizes, dtype, biased), targets, reduction="sum", upstream=-2.5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_outside_the_mask_do_not_count(implementation, dtype, reduction) -> None:
    x, weight, bias = inputs(14, 6, 19, dtype)
    targets = targets_for(14, 19)
    mask = mask_for(targets)
    mask[4:8] = False  # a whole chunk
    targets[~mask] = 1000
    found = check([x.view(2, 7, 6), weight, bias], targets.view(2, 7), mask.view(2, 7), reduction, 3.0)
    assert bool((found[1].view(14, 6)[~mask] == 0).all())


@pytest.mark.parametrize("rows", [0, 6])
def test_where_nothing_counts_loss_and_gradients_are_zero(implementation, rows) -> None:
    given = leaves(*inputs(rows, 3, 5))
    for mask in (torch.zeros(rows, dtype=torch.bool), None)[: 1 if rows else 2]:
        loss = linear_cross_entropy(*given, torch.full((rows,), -1), mask=mask)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in given)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_inputs_will_do(implementation, layout) -> None:
    lay = LAYOUTS[layout]
    x, weight, bias = inputs(9, 8, 21)
    wide = torch.stack([bias, bias], -1)[:, 0]
    check([lay(x), lay(weight), wide], targets_for(9, 21), mask_for(targets_for(9, 21)))


@pytest.mark.parametrize("needed", [*itertools.product([False, True], repeat=3)])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
def test_only_gradients_that_are_asked_for_appear(implementation, needed, biased) -> None:
    if implementation == "triton" and sum(needed) == 2:
        pytest.skip("the same loop as for the others")
    full, some = leaves(*inputs(9, 3, 7, biased=biased)), inputs(9, 3, 7, biased=biased)
    targets = targets_for(9, 7)
    linear_cross_entropy(*full, targets).backward()
    for leaf, need in zip(some, needed, strict=True):
        if leaf is not None:
            leaf.requires_grad_(need)
    loss = linear_cross_entropy(*some, targets)
    assert loss.requires_grad == any(leaf is not None and leaf.requires_grad for leaf in some)
    if loss.requires_grad:
        loss.backward()
    for leaf, wanted in zip(some, full, strict=True):
        if leaf is not None:
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or torch.equal(leaf.grad, wanted.grad)


def test_without_gradients_only_the_loss_is_computed(implementation) -> None:
    given, targets = leaves(*inputs(9, 3, 7)), targets_for(9, 7)
    expected = linear_cross_entropy(*given, targets)
    with torch.no_grad():
        actual = linear_cross_entropy(*given, targets)
    assert not actual.requires_grad
    assert torch.equal(actual, expected)


def test_backward_twice_adds_the_same_gradient_twice(implementation) -> None:
    given, targets = leaves(*inputs(9, 3, 7)), targets_for(9, 7)
    loss = linear_cross_entropy(*given, targets)
    loss.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in given]
    loss.backward()
    for leaf, first in zip(given, once, strict=True):
        assert torch.equal(leaf.grad, 2 * first)


def test_the_logits_of_all_rows_never_exist(monkeypatch) -> None:
    seen = []

    def rows(logits: Tensor, *rest) -> Tensor:
        seen.append(logits)
        return reference.in_place(logits, *rest)

    rows_of_a_chunk(monkeypatch, 4)
    options = (True, "full", True, True, True)
    x, weight, bias = inputs(11, 3, 50)
    chunks.Chunked(rows)(x, weight, bias, targets_for(11, 50), None, *options)
    assert [len(logits) for logits in seen] == [4, 4, 3]
    assert len({logits.data_ptr() for logits in seen}) == 1
    assert seen[0].stride(0) % chunks.ALIGNMENT == 0


def in_bytes_by_chunks(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss and the gradients of x, weight and bias where all factors are bytes, 40 rows at a time."""
    loss, of_x, of_weight, of_bias = torch.zeros(()), [], 0.0, 0.0
    for start in range(0, len(x), 40):
        rows, wanted = x[start : start + 40], targets[start : start + 40]
        logits = in_bytes(rows, 1) @ in_bytes(weight, 1).t() + bias
        loss = loss + functional.cross_entropy(logits, wanted, reduction="sum") / len(x)
        gradient = (logits.softmax(1) - functional.one_hot(wanted, len(weight))) / len(x)
        of_x.append(in_bytes(gradient, 1) @ in_bytes(weight, 0))
        of_weight = of_weight + in_bytes(gradient, 0).t() @ in_bytes(rows, 0)
        of_bias = of_bias + gradient.sum(0)
    return [loss, torch.cat(of_x), of_weight, of_bias]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_int8_products_are_those_of_bytes(monkeypatch, name) -> None:
    rows_of_a_chunk(monkeypatch, 40)
    given, targets = inputs(90, 130, 150), targets_for(90, 150)
    given[1] *= 0.2
    wanted = in_bytes_by_chunks(*(t.double() for t in given), targets)
    mine = leaves(*given)
    with running(name):
        loss = linear_cross_entropy(*mine, targets, operands="int8")
        loss.backward()
    for ours, true in zip([loss.detach(), *(leaf.grad for leaf in mine)], wanted, strict=True):
        assert float((ours - true).norm() / true.norm()) < 1e-3  # floats would be 5e-3 away


@pytest.mark.parametrize("products", ["float32", "own"])
def test_the_error_does_not_grow_with_the_number_of_chunks(monkeypatch, products) -> None:
    if products == "own":
        monkeypatch.setattr(chunks, "product_dtype", lambda x, _: x.dtype)
    given, targets = inputs(256, 8, 12, torch.bfloat16), targets_for(256, 12)
    given[0].abs_()  # so that sums over the rows grow
    exact = leaves(*given, dtype=torch.float64)
    separate(*exact, targets, None, "sum").backward()
    errors = []
    for rows in (256, 1):
        rows_of_a_chunk(monkeypatch, rows)
        mine = leaves(*given)
        linear_cross_entropy(*mine, targets, reduction="sum").backward()
        errors.append(
            [
                float((a.grad.double() - b.grad).norm() / b.grad.norm())
                for a, b in zip(mine, exact, strict=True)
            ]
        )
    assert all(many <= 1.5 * one + 1e-6 for one, many in zip(*errors, strict=True)), errors
    assert max(errors[1]) < 2**-8


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_products_in_bfloat16_are_as_exact_as_torchs(monkeypatch, name) -> None:
    monkeypatch.setattr(chunks, "product_dtype", lambda x, _: x.dtype)
    rows_of_a_chunk(monkeypatch, 4)
    with running(name):
        check(inputs(13, 24, 31, torch.bfloat16), targets_for(13, 31), mask_for(targets_for(13, 31)))


@pytest.mark.parametrize("name", ["torch", "native"])
def test_half_loses_at_most_what_bfloat16_operands_lose(monkeypatch, name) -> None:
    if name == "native" and not linear_cpu.built:
        pytest.skip("no native code for this machine was built")
    rows_of_a_chunk(monkeypatch, 40)
    given, targets = inputs(90, 130, 150), targets_for(90, 150)
    given[1] *= 0.2
    exact, mine, rounded = leaves(*given, dtype=torch.float64), leaves(*given), leaves(*given)
    separate(*exact, targets, None, "mean").backward()
    x, weight, bias = rounded
    separate(x.bfloat16().float(), weight.bfloat16().float(), bias, targets, None, "mean").backward()
    with running(name):
        loss = linear_cross_entropy(*mine, targets, operands="half")
        loss.backward()
    with torch.no_grad():
        most = 4e-3 if has_matrix_units(loss.device) else 1e-3
        assert abs(float(loss.double() - separate(*exact, targets, None, "mean"))) < most
    for place, found in enumerate(zip(mine, rounded, exact, strict=True)):
        ours, bfloats, true = (leaf.grad.double() for leaf in found)
        away = float((ours - true).norm() / true.norm())
        share = 2 if has_matrix_units(x.device) else 1 / 4
        assert away <= share * float((bfloats - true).norm() / true.norm()), NAMES[place]
        assert away > 2e-6 or name == "torch"  # which may multiply in float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_stay_as_they_were_and_every_run_gives_the_same_bits(implementation, dtype) -> None:
    given, targets = inputs(13, 24, 31, dtype), targets_for(13, 31)
    before = [x.clone() for x in given]
    runs = []
    for _ in range(2):
        run = leaves(*given)
        loss = linear_cross_entropy(*run, targets, mask=mask_for(targets))
        loss.backward(torch.tensor(0.5))
        runs.append([loss, *(leaf.grad for leaf in run)])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(given, before, strict=True))


def test_float64_runs_in_torch(implementation) -> None:
    kinds = [leaves(*inputs(9, 3, 7), dtype=torch.float64) for _ in range(2)]
    targets = targets_for(9, 7)
    mask = mask_for(targets)
    linear_cross_entropy(*kinds[0], targets, mask=mask).backward()
    separate(*kinds[1], targets, mask, "mean").backward()
    for mine, wanted in zip(*kinds, strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_the_bias_may_have_another_dtype_than_the_weight(implementation) -> None:
    x, weight, bias = inputs(9, 3, 7)
    given = leaves(x.bfloat16(), weight.bfloat16(), bias)
    linear_cross_entropy(*given, targets_for(9, 7)).backward()
    assert [leaf.grad.dtype for leaf in given] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_a_target_outside_the_vocabulary_is_refused(implementation) -> None:
    with pytest.raises(ValueError, match="target 7 of row 2 is outside the vocabulary of 7"):
        linear_cross_entropy(*inputs(3, 2, 7), torch.tensor([0, 6, 7]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.ones(5, 4)},
            r"x \[2, 3\] torch.float32 and weight \[5, 4\] torch.float32 do not fit",
        ),
        ({"weight": torch.ones(5, 3).double()}, "weight .* torch.float64 do not fit"),
        ({"bias": torch.ones(3)}, r"bias has shape \[3\]; give it \[5\]"),
        ({"targets": torch.zeros(1, dtype=torch.int64)}, r"targets are torch.int64 \[1\]"),
        ({"mask": torch.ones(2)}, "mask is torch.float32"),
        ({"reduction": "none"}, "reduction is 'none'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message) -> None:
    arguments = {"x": torch.ones(2, 3), "weight": torch.ones(5, 3), "bias": torch.ones(5)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | {"targets": torch.zeros(2, dtype=torch.int64)} | change))


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_is_sound(masked) -> None:
    x, weight, bias = leaves(*inputs(9, 3, 7))
    targets = targets_for(9, 7)
    mask = mask_for(targets) if masked else None
    torch.library.opcheck(
        _linear_cross_entropy, (x, weight, bias, targets, mask, True, "full", True, True, True)
    )
    torch.library.opcheck(
        _linear_cross_entropy, (x.detach(), weight, None, targets, mask, True, "int8", False, True, False)
    )


def test_a_gradient_that_vmap_hides_is_refused() -> None:
    (x, weight, bias), targets = inputs(9, 3, 7), targets_for(9, 7)
    call = torch.vmap(lambda x: linear_cross_entropy(x, weight, bias, targets))
    rows = torch.stack([x, 2 * x])
    torch.testing.assert_close(call(rows)[1], linear_cross_entropy(2 * x, weight, bias, targets))
    with pytest.raises(RuntimeError, match="linear_cross_entropy: vmap hides that a gradient"):
        call(rows.requires_grad_())


def test_compiling_changes_nothing() -> None:
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    kinds, targets = [leaves(*inputs(9, 3, 7)) for _ in range(2)], targets_for(9, 7)
    for call, given in zip((linear_cross_entropy, compiled), kinds, strict=True):
        call(*given, targets, mask=mask_for(targets)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*kinds, strict=True))


def test_its_products_are_counted() -> None:
    x, weight, bias = leaves(*inputs(9, 3, 7))
    with flop_counter(display=False) as counter:
        linear_cross_entropy(x.detach(), weight, bias, targets_for(9, 7))
    assert counter.get_total_flops() == 2 * (2 * 9 * 3 * 7)
