"""Initial values, bit for bit those of the original."""

import pytest
import torch

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer, LoraConfig
from tests.support import fixture, float32_tensor

CASES = fixture("initialization.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed-{case['config']['random_seed']}")
def test_base_and_adapter_values_are_bit_exact(case: dict) -> None:
    model = DecoderOnlyTransformer(ModelConfig(**case["config"]))
    _assert_equals(model.base_parameters(), case)
    expected = case["lora"]
    model.attach_lora(LoraConfig(**{k: expected[k] for k in ("rank", "alpha", "targets", "random_seed")}))
    _assert_equals(model.adapter_parameters(), expected)


def _assert_equals(parameters: dict[str, torch.nn.Parameter], expected: dict) -> None:
    assert list(parameters) == expected["names"]
    assert [list(p.shape) for p in parameters.values()] == expected["shapes"]
    values = torch.cat([p.detach().flatten() for p in parameters.values()])
    assert torch.equal(values, float32_tensor(expected["values_f32le_base64"]))


def test_building_a_model_leaves_the_global_generator_alone(config: ModelConfig) -> None:
    before = torch.get_rng_state()
    DecoderOnlyTransformer(config)
    assert torch.equal(before, torch.get_rng_state())
