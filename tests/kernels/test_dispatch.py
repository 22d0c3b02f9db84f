"""Which implementation runs: the device's own first, another where it declines, torch's in the end."""

import pytest
import torch

from kernels.dispatch import Operation, explain, use


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


def test_it_explains_itself(operation):
    assert explain()["toy"] == {"cpu": "native", "cuda": "triton", "mps": "torch"}
