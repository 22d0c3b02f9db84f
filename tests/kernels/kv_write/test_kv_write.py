"""Writing keys and values into pages: every number where it belongs, and no other touched."""

import math

import pytest
import torch

from kernels import kv_write
from tests.kernels.cases import virtual
from tests.kernels.flash_attention.running import IMPLEMENTATIONS, among_nan, running

PAGES, HEADS, PAGE, WIDTH = 7, 3, 5, 6
Tensors = list[torch.Tensor]


def problem(count: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Tensors:
    """Key pages, value pages, keys, values and slots, one of which is -1."""
    generator = torch.Generator().manual_seed(count)
    shapes = [(PAGES, HEADS, PAGE, width)] * 2 + [(count, HEADS, width)] * 2
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:count]
    slots[count // 2 : count // 2 + 1] = -1
    return [*tensors, slots]


def definition(tensors: Tensors) -> Tensors:
    key_pages, value_pages, keys, values, slots = tensors
    key_pages, value_pages = key_pages.clone(), value_pages.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_pages[slot // PAGE, :, slot % PAGE] = keys[i]
            value_pages[slot // PAGE, :, slot % PAGE] = values[i]
    return [key_pages, value_pages]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 4, 17])
def test_each_token_lands_in_its_slot_bit_for_bit(implementation, dtype, count) -> None:
    tensors = problem(count, dtype)
    expected, sources = definition(tensors), [x.clone() for x in tensors[2:]]
    with running(implementation):
        kv_write(*tensors)
    assert all(map(torch.equal, tensors[:2], expected))
    assert all(map(torch.equal, tensors[2:], sources))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [345, 1024])  # times 3 heads, where Triton takes 1,024 numbers at a time
def test_tokens_larger_than_a_block(implementation, width) -> None:
    tensors = problem(2, width=width)
    tensors[4] = torch.tensor([34, 3])
    expected = definition(tensors)
    with running(implementation):
        kv_write(*tensors)
    assert all(map(torch.equal, tensors[:2], expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_do_not_matter(implementation) -> None:
    tensors = problem(9)
    expected = definition(tensors)
    changes = [
        among_nan,
        lambda x: x.mT.contiguous().mT,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    ]
    slots = torch.stack([tensors[4], torch.zeros_like(tensors[4])], 1)[:, 0]
    for turn in range(len(changes)):  # every tensor has strides of its own
        moved = [changes[(i + turn) % len(changes)](x) for i, x in enumerate(tensors[:4])]
        with running(implementation):
            kv_write(*moved, slots)
        assert all(map(torch.equal, moved[:2], expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_around_the_slots_is_touched(implementation) -> None:
    tensors = problem(9)
    room = torch.full((PAGES + 2, HEADS + 2, PAGE + 2, WIDTH + 2), 7.0)
    inside = room[1:-1, 1:-1, 1:-1, 1:-1].copy_(tensors[0])
    expected = room.clone()
    expected[1:-1, 1:-1, 1:-1, 1:-1] = definition(tensors)[0]
    with running(implementation):
        kv_write(inside, *tensors[1:])
    assert torch.equal(room, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_beyond_32_bits(implementation) -> None:
    _, _, keys, values, _ = problem(2, torch.bfloat16)
    room = virtual(2**31 + 1000, torch.bfloat16)
    pages = [
        room.as_strided((2, HEADS, PAGE, WIDTH), (2**31, 30, 6, 1)),
        room.as_strided((2, HEADS, PAGE, WIDTH), (2**31, 30, 6, 1), 200),
    ]
    with running(implementation):
        kv_write(*pages, keys, values, torch.tensor([8, 2]))
    assert torch.equal(pages[0][1, :, 3], keys[0])
    assert torch.equal(pages[1][1, :, 3], values[0])
    assert torch.equal(pages[0][0, :, 2], keys[1])


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("slot", [-2, 35, 2**40])
def test_slots_outside_are_refused_and_nothing_is_written(implementation, slot) -> None:
    tensors = problem(4)
    tensors[4][3] = slot
    before = [x.clone() for x in tensors]
    with (
        running(implementation),
        pytest.raises(ValueError, match=f"-1 or 0 to 34, the pages' last, got {slot}"),
    ):
        kv_write(*tensors)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("slot", [-2, 35, 2**40])
def test_slots_outside_are_skipped_on_a_gpu(slot) -> None:
    tensors = problem(4)
    tensors[4][3] = -1
    expected = definition(tensors)
    tensors[4][3] = slot
    with running("triton"):
        kv_write(*tensors)
    assert all(map(torch.equal, tensors[:2], expected))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autograd_sees_that_pages_were_written(implementation) -> None:
    tensors = problem(4)
    weight = torch.ones_like(tensors[0], requires_grad=True)
    product = tensors[0] * weight
    with running(implementation):
        kv_write(*tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_be_made_in_inference_mode(implementation) -> None:
    with torch.inference_mode():
        tensors = problem(4)
        expected = definition(tensors)
        with running(implementation):
            kv_write(*tensors)
        assert all(map(torch.equal, tensors[:2], expected))


def test_pages_that_require_gradients_are_refused() -> None:
    for place in range(2):
        tensors = problem(4)
        tensors[place].requires_grad_()
        with pytest.raises(ValueError, match="require gradients"):
            kv_write(*tensors)


def test_it_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.riftco.kv_write.default, tuple(problem(4)))


def test_it_compiles_without_a_break() -> None:
    tensors = problem(4)
    expected = definition(tensors)

    def double_after(*arguments: torch.Tensor) -> torch.Tensor:
        kv_write(*arguments)
        return arguments[0] * 2

    doubled = torch.compile(double_after, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(map(torch.equal, tensors[:2], expected))
    assert torch.equal(doubled, expected[0] * 2)


P, K, S = torch.zeros(3, 2, 4, 6), torch.zeros(5, 2, 6), torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((P[0], P, K, K, S), r"pages must be \[P, H, page, d\] and slots \[N\], got \[2, 4, 6\] and \[5\]"),
        ((P, P, K, K, S.int()), "slots must be int64 on cpu, got torch.int32"),
        ((P, P[:2], K, K, S), r"value_pages must be .*\[3, 2, 4, 6\].*got .*\[2, 2, 4, 6\]"),
        ((P, P, K[:4], K, S), r"keys must be .*\[5, 2, 6\].*got .*\[4, 2, 6\]"),
        ((P, P, K, K.bfloat16(), S), "values must be torch.float32 .*got torch.bfloat16"),
        ((P, P, K.to("meta"), K, S), "keys must be .* on cpu, got .* on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        kv_write(*arguments)
    assert not math.isnan(P.sum())
