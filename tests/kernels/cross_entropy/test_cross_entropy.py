"""Cross-entropy from logits: every implementation against the definition in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cross_entropy import (
    _cross_entropy,
    _cross_entropy_backward,
    cpu,
    cross_entropy,
    reference,
    triton_cross_entropy,
)
from tests.kernels.cases import (
    DTYPES,
    IMPLEMENTATIONS,
    LAYOUTS,
    assert_as_exact_as,
    bits,
    far_apart,
    leaves,
    random,
    running,
)

SHAPES = [(1, 1), (3, 7), (4, 15), (2, 16), (5, 17), (3, 64), (4, 127), (9, 31), (2, 5000)]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    if request.param == "native" and cpu._forward is None:
        pytest.skip("no native code was built")
    monkeypatch.setattr(triton_cross_entropy, "BLOCK", 16)  # rows of several blocks
    with running(request.param):
        yield request.param


def targets_for(logits: Tensor, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)


def mask_for(targets: Tensor) -> Tensor:
    """The first position does not count, nor some others."""
    keep = torch.rand(targets.shape, generator=torch.Generator().manual_seed(8)) > 0.4
    keep.view(-1)[:1] = False
    return keep


def separate(logits: Tensor, targets: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """torch's own; its mean over nothing is NaN, so this needs a mask that keeps something."""
    kept = targets if mask is None else targets.masked_fill(~mask, -100)
    return functional.cross_entropy(logits.flatten(0, -2), kept.flatten(), reduction=reduction)


def check(
    logits: Tensor, targets: Tensor, mask: Tensor | None, reduction: str, upstream: float
) -> list[Tensor]:
    """Our loss and gradient, held against torch's own and float64."""
    (mine,), (torchs,), (exact,) = leaves(logits), leaves(logits), leaves(logits, dtype=torch.float64)
    losses = [cross_entropy(mine, targets, mask=mask, reduction=reduction)]
    losses += [separate(x, targets, mask, reduction) for x in (torchs, exact)]
    assert losses[0].dtype == torch.float32
    assert_as_exact_as(*losses, 2, "loss")
    for loss in losses:
        (loss * upstream).backward()
    assert mine.grad.is_contiguous() or not logits.is_contiguous()
    assert_as_exact_as(mine.grad, torchs.grad, exact.grad, 3, "gradient")
    return [losses[0].detach(), mine.grad]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_are_as_exact_as_torchs(implementation, shape, dtype, monkeypatch) -> None:
    if shape[1] > 1000:
        monkeypatch.setattr(triton_cross_entropy, "BLOCK", 1024)
    logits = random(*shape, dtype=dtype, scale=3)
    check(logits, targets_for(logits), None, "mean", 1.0)
    check(logits, targets_for(logits), None, "sum", -2.5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_outside_the_mask_do_not_count(implementation, dtype, reduction) -> None:
    logits = random(2, 6, 37, dtype=dtype)
    targets, mask = targets_for(logits), mask_for(targets_for(logits))
    targets[~mask] = -100  # never looked at
    check(logits, targets, mask, reduction, 3.0)
    logits[~mask] = torch.nan
    (leaf,) = leaves(logits)
    loss = cross_entropy(leaf, targets, mask=mask, reduction=reduction)
    loss.backward()
    assert bool(loss.isfinite())
    assert bool((leaf.grad[~mask] == 0).all())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 3])
def test_where_nothing_counts_loss_and_gradient_are_zero(implementation, rows, reduction) -> None:
    (logits,) = leaves(random(rows, 5))
    mask = torch.zeros(rows, dtype=torch.bool)
    for chosen in (mask, None) if rows == 0 else (mask,):
        logits.grad = None
        targets = torch.full((rows,), -1)
        loss = cross_entropy(logits, targets, mask=chosen, reduction=reduction)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert torch.equal(logits.grad, torch.zeros(rows, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_logits_will_do(implementation, layout) -> None:
    logits = LAYOUTS[layout](random(9, 35))
    targets, mask = targets_for(logits), mask_for(targets_for(logits))
    spread = torch.stack([targets, targets], -1)[:, 0], torch.stack([mask, ~mask], -1)[:, 0]
    expected = check(logits.contiguous(), targets, mask, "mean", 2.0)
    for actual, wanted in zip(check(logits, *spread, "mean", 2.0), expected, strict=True):
        assert torch.equal(bits(actual), bits(wanted))


def test_logits_near_overflow_and_excluded_entries_are_exact(implementation) -> None:
    logits = torch.full((4, 20), -3e38)
    logits[0, 3] = 3e38
    logits[1, ::2] = 88.0
    logits[2, 1:] = -torch.inf
    logits[3] = torch.tensor([-torch.inf] * 17 + [1e4, 1e4 + 1, 1e4 - 1])
    (leaf,) = leaves(logits)
    loss = cross_entropy(leaf, torch.tensor([3, 2, 0, 18]), reduction="sum")
    loss.backward()
    expected = torch.tensor(10.0).log() + torch.tensor([1.0, 2.718281828, 0.36787944]).sum().log() - 1
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    exact = logits.double().softmax(-1)
    exact[range(4), [3, 2, 0, 18]] -= 1
    torch.testing.assert_close(leaf.grad.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", [0, 18, 36])
def test_what_is_no_number_is_not_lost(implementation, poison, position) -> None:
    logits = random(3, 37)
    logits[1, position] = poison
    (leaf,) = leaves(logits)
    loss = cross_entropy(leaf, torch.tensor([1, 2, 3]))
    loss.backward()
    assert bool(loss.isnan())
    assert leaf.grad.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("target", [-1, 5, 2**40])
def test_a_target_outside_the_vocabulary_is_refused(implementation, target) -> None:
    with pytest.raises(
        ValueError, match=rf"target {target} of row 1 is outside the vocabulary of 5; correct it"
    ):
        cross_entropy(random(3, 5), torch.tensor([0, target, 1]))


@pytest.mark.parametrize("target", [-1, 5, 2**40])
@pytest.mark.parametrize("module", [reference, triton_cross_entropy])
def test_where_it_cannot_be_refused_a_target_outside_gives_nan(module, target) -> None:
    logits, targets = random(3, 5), torch.tensor([0, target, 1])
    with running("triton"):
        loss, statistics = module.forward(logits, targets, None, True)
        gradient = module.backward(torch.ones(()), logits, targets, None, statistics, True)
    assert bool(loss.isnan())
    assert gradient.isnan().all(-1).tolist() == [False, True, False]


def test_rows_beyond_two_billion_elements_are_found(implementation) -> None:
    logits = far_apart(random(2, 16, dtype=torch.bfloat16))
    check(logits, torch.tensor([3, 4]), None, "mean", 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_stay_as_they_were_and_every_run_gives_the_same_bits(implementation, dtype) -> None:
    logits = random(9 if implementation == "triton" else 3000, 37, dtype=dtype)
    targets, before = targets_for(logits), logits.clone()
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, threads):
            torch.set_num_threads(count)
            (leaf,) = leaves(logits)
            loss = cross_entropy(leaf, targets, mask=mask_for(targets))
            loss.backward()
            runs.append([loss, leaf.grad])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(runs[0], other, strict=True))
    assert torch.equal(bits(logits), bits(before))


def test_float64_runs_in_torch(implementation) -> None:
    mine, exact = leaves(*[random(5, 9)] * 2, dtype=torch.float64)
    targets, mask = targets_for(mine), mask_for(targets_for(mine))
    losses = cross_entropy(mine, targets, mask=mask), separate(exact, targets, mask, "mean")
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(mine.grad, exact.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.ones(())}, "logits are one number"),
        ({"logits": torch.ones(2, 3, dtype=torch.int64)}, "input is torch.int64; convert"),
        ({"logits": torch.ones(2, 0)}, "the vocabulary is empty"),
        (
            {"targets": torch.zeros(3, dtype=torch.int64)},
            r"targets are torch.int64 \[3\]; make them int64 \[2\]",
        ),
        ({"targets": torch.zeros(2)}, r"targets are torch.float32 \[2\]; make them int64"),
        ({"mask": torch.ones(2, dtype=torch.int64)}, r"mask is torch.int64 \[2\]; make it bool \[2\]"),
        ({"mask": torch.ones(2, 1, dtype=torch.bool)}, r"mask is torch.bool \[2, 1\]"),
        ({"reduction": "none"}, "reduction is 'none'; choose mean or sum"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message) -> None:
    arguments = {"logits": torch.ones(2, 3), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        cross_entropy(**(arguments | change))


@pytest.mark.parametrize("masked", [False, True])
def test_the_operators_are_sound(masked) -> None:
    logits = random(6, 5).t()
    targets = targets_for(logits)
    mask = mask_for(targets) if masked else None
    torch.library.opcheck(_cross_entropy, (logits.detach().requires_grad_(), targets, mask, True))
    _, statistics = _cross_entropy(logits, targets, mask, True)
    torch.library.opcheck(_cross_entropy_backward, (torch.ones(()), logits, targets, mask, statistics, True))


def test_compiling_changes_nothing() -> None:
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    kinds = leaves(random(4, 9), random(4, 9))
    targets = targets_for(kinds[0])
    losses = [call(x, targets) for call, x in zip((cross_entropy, compiled), kinds, strict=True)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert torch.equal(kinds[0].grad, kinds[1].grad)
