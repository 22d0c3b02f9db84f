"""Model dimensions, tokenizer state and parameter shapes: valid ones pass, each rule refuses its breach."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import ModelBundle, ModelConfig, ParameterSpec, TokenizerSpec
from tests.artifacts.bundles import CONFIG, NAMES
from tests.support import FIXTURES

sizes = st.integers(1, 40)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_the_names_shapes_and_order_of_the_originals_bundles(name):
    bundle = ModelBundle.load(FIXTURES / f"{name}.rift")
    assert bundle.config.parameter_specs() == bundle.parameters


@given(V=sizes, C=sizes, heads=sizes, width_per_head=sizes, blocks=st.integers(1, 4), F=sizes)
def test_parameter_counts_add_up_to_the_closed_formula(V, C, heads, width_per_head, blocks, F):
    D = heads * width_per_head
    specs = ModelConfig(V, C, D, heads, blocks, F).parameter_specs()
    total = 2 * V * D + C * D + blocks * (4 * D * D + 2 * D * F + 9 * D + F) + 2 * D + V
    assert sum(spec.count for spec in specs) == total
    assert len({spec.name for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("vocabulary_size", 0, ValueError),
        ("vocabulary_size", 2**32 + 1, ValueError),
        ("maximum_context", -1, ValueError),
        ("maximum_context", 2**32 + 1, ValueError),
        ("model_width", 4.0, TypeError),
        ("head_count", True, TypeError),
        ("head_count", 3, ValueError),
        ("block_count", "1", TypeError),
        ("feed_forward_width", None, TypeError),
        ("random_seed", -1, ValueError),
        ("random_seed", 2**32, ValueError),
        ("random_seed", False, TypeError),
        ("layer_norm_epsilon", 0.0, ValueError),
        ("layer_norm_epsilon", -1e-5, ValueError),
        ("layer_norm_epsilon", 1e-60, ValueError),
        ("layer_norm_epsilon", 1e39, ValueError),
        ("layer_norm_epsilon", math.nan, ValueError),
        ("layer_norm_epsilon", True, TypeError),
        ("layer_norm_epsilon", "1e-5", TypeError),
    ],
)
def test_a_config_names_the_field_and_the_value_it_refuses(field, value, error):
    with pytest.raises(error, match=field) as caught:
        dataclasses.replace(CONFIG, **{field: value})
    assert str(value) in str(caught.value)


def test_the_extremes_of_a_config_are_allowed():
    ModelConfig(2**32, 2**32, 1, 1, 1, 1, random_seed=2**32 - 1, layer_norm_epsilon=1.5e-45)
    ModelConfig(1, 1, 1, 1, 1, 1, random_seed=0, layer_norm_epsilon=3.4e38)


def test_an_integer_epsilon_becomes_the_float_that_a_bundle_can_hold():
    config = dataclasses.replace(CONFIG, layer_norm_epsilon=1)
    assert repr(config.layer_norm_epsilon) == "1.0"
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "change", [{"extra": 1}, {"layer_norm_epsilon": 1}, {"model_width": 4.0}, {"random_seed": True}]
)
def test_a_config_object_must_have_the_eight_keys_and_their_types(change):
    with pytest.raises((TypeError, ValueError)):
        ModelConfig.from_json(CONFIG.to_json() | change)


@pytest.mark.parametrize("key", sorted(CONFIG.to_json()))
def test_a_config_object_without_one_key_is_refused(key):
    with pytest.raises(ValueError, match="exactly the keys"):
        ModelConfig.from_json({name: value for name, value in CONFIG.to_json().items() if name != key})


@settings(max_examples=30)
@given(st.permutations(range(256)), st.integers(1, 256))
def test_bytes_in_any_order_are_a_byte_tokenizer(order, count):
    spec = TokenizerSpec("byte", tuple(order[:count]))
    assert spec.vocabulary_size == count
    assert TokenizerSpec.from_json(spec.to_json()) == spec


def test_merges_are_a_bpe_tokenizer_with_all_bytes():
    spec = TokenizerSpec("bpe", merge_rules=[[97, 98, 256], [256, 255, 257]])  # type: ignore[arg-type]
    assert spec.merge_rules == ((97, 98, 256), (256, 255, 257))
    assert spec.vocabulary_size == 258
    assert TokenizerSpec.from_json(spec.to_json()) == spec
    assert TokenizerSpec("bpe", merge_rules=()).vocabulary_size == 256
    assert TokenizerSpec("bpe", (), ()) == TokenizerSpec("bpe", None, ())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("BPE", None, ()), ValueError),
        (("word", (1,), None), ValueError),
        (("byte", (), None), ValueError),
        (("byte", None, None), ValueError),
        (("byte", (1, 2, 1), None), ValueError),
        (("byte", (256,), None), ValueError),
        (("byte", (-1,), None), ValueError),
        (("byte", (True,), None), TypeError),
        (("byte", (1.0,), None), TypeError),
        (("byte", (1,), ((1, 2, 256),)), ValueError),
        (("bpe", (1,), ()), ValueError),
        (("bpe", None, ((1, 2, 257),)), ValueError),
        (("bpe", None, ((1, 256, 256),)), ValueError),
        (("bpe", None, ((256, 1, 256),)), ValueError),
        (("bpe", None, ((-1, 1, 256),)), ValueError),
        (("bpe", None, ((1, 2, 256), (1, 2, 257))), ValueError),
        (("bpe", None, ((1, 2, 256), (1, 2, 256))), ValueError),
        (("bpe", None, ((1, True, 256),)), TypeError),
        (("bpe", None, ((1, 2),)), ValueError),
        (("bpe", None, ((1, 2, 256, 0),)), ValueError),
    ],
)
def test_a_state_that_no_tokenizer_has_is_refused(arguments, error):
    with pytest.raises(error):
        TokenizerSpec(*arguments)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"method": "byte"},
        {"method": "byte", "byte_vocabulary": [1], "merge_rules": []},
        {"method": "byte", "byte_vocabulary": "abc"},
        {"method": "bpe", "byte_vocabulary": [1]},
        {"method": "bpe", "merge_rules": None},
        {"method": ["bpe"], "merge_rules": []},
        {"method": "gpt", "byte_vocabulary": [1]},
    ],
)
def test_a_tokenizer_object_must_be_exactly_one_state(value):
    with pytest.raises((TypeError, ValueError)):
        TokenizerSpec.from_json(value)


def test_a_parameter_counts_its_elements():
    assert ParameterSpec("w", (3, 4)).count == 12
    assert ParameterSpec("w", [5]).shape == (5,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [("", (1,), ValueError), (1, (1,), TypeError), ("w", (0,), ValueError), ("w", (2, True), TypeError)],
)
def test_a_parameter_needs_a_name_and_positive_dimensions(name, shape, error):
    with pytest.raises(error):
        ParameterSpec(name, shape)
