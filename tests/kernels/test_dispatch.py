"""Which implementation runs: the device's own first, another where it declines, torch's in the end."""

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from kernels import dispatch
from kernels.dispatch import Operation, explain, use
from tests.kernels.cases import random


@pytest.fixture
def operation() -> Operation:
    return Operation(
        "toy",
        torch=lambda x: "torch",
        native=lambda x: "native" if x.dtype == torch.float32 else NotImplemented,
        triton=lambda x: "triton",
    )


def test_each_device_has_its_own(operation):
    assert operation(torch.ones(1)) == "native"
    assert operation(torch.ones(1, device="meta")) == "torch"


def test_what_one_declines_the_next_does(operation):
    assert operation(torch.ones(1, dtype=torch.float64)) == "torch"


def test_an_implementation_can_be_preferred_for_a_while(operation):
    with use("triton"):
        assert operation(torch.ones(1)) == "triton"
        with use("torch"):
            assert operation(torch.ones(1)) == "torch"
        assert operation(torch.ones(1)) == "triton"
    assert operation(torch.ones(1)) == "native"


def test_what_does_not_exist_is_passed_over():
    assert Operation("toy", torch=lambda x: "torch", native=None)(torch.ones(1)) == "torch"


def test_it_explains_itself(operation, monkeypatch):
    monkeypatch.setattr(dispatch, "_is_there", lambda kind: kind != "xla")
    assert explain()["toy"] == {"cpu": "native", "cuda": "triton", "mps": "torch", "xla": "unavailable"}


def test_a_device_that_is_not_there_is_unavailable_for_every_operation():
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    there["xla"] = find_spec("torch_xla") is not None
    assert len(explain()) > 15
    for found in explain().values():
        assert {kind: found[kind] != "unavailable" for kind in there} == there
        assert found["cpu"] != "unavailable"


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_metal_and_tpus_run_torch(operation, kind):
    """Fake tensors: the machine needs no such device."""
    with FakeTensorMode():
        assert operation(torch.empty(1, device=kind)) == "torch"
    assert {tuple(each.order(torch.device(kind))) for each in dispatch._operations.values()} == {("torch",)}


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_metal_and_tpus_give_the_results_of_a_cpu(kind):
    if explain()["gelu"][kind] == "unavailable":
        pytest.skip(f"no {kind} device here")
    x, scale = random(2, 3, 7, 16), random(16, seed=1)
    weight = kernels.quantize_nf4(random(5, 16, seed=2))
    for call in (
        lambda x: kernels.gelu(x, scale.to(x.device)),
        lambda x: kernels.layer_norm(x, scale.to(x.device), scale.to(x.device), 1e-5),
        lambda x: kernels.flash_attention(x, x, x),
        lambda x: kernels.cross_entropy(x[0, 0], torch.arange(7, device=x.device)),
        lambda x: kernels.nf4_linear(x, weight.to(x.device)),
    ):
        torch.testing.assert_close(call(x.to(kind)).cpu(), call(x), atol=1e-4, rtol=1e-4)
