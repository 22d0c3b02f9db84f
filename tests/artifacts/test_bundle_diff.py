"""Comparing bundles: equal ones differ in nothing, others by exact norms."""

import numpy as np
import pytest

from artifacts import ModelBundle
from artifacts.bundle_diff import bundle_difference
from tests.artifacts.bundles import small_bundle


def changed(bundle: ModelBundle, weights: np.ndarray, **changes) -> ModelBundle:
    options = {"stage": bundle.stage, "metadata": bundle.metadata} | changes
    return ModelBundle(bundle.config, bundle.tokenizer, bundle.parameters, weights, **options)


def test_a_bundle_does_not_differ_from_itself():
    difference = bundle_difference(small_bundle(), small_bundle())
    assert (difference.fields, difference.tensors) == ([], [])
    assert difference.tensor_count == len(small_bundle().parameters)


def test_one_changed_tensor_is_measured():
    bundle = small_bundle()
    weights = bundle.weights.copy()
    first = bundle.parameters[0]
    weights[:2] += np.float32([3, -4])
    (tensor,) = bundle_difference(bundle, changed(bundle, weights)).tensors
    assert tensor.name == first.name
    assert tensor.norm == pytest.approx(5, rel=1e-6)
    assert tensor.largest == pytest.approx(4, rel=1e-6)
    assert tensor.relative == pytest.approx(5 / np.linalg.norm(bundle.weights[: first.count]), rel=1e-6)


def test_fields_are_compared_to_the_leaf():
    bundle = small_bundle()
    other = changed(bundle, bundle.weights, stage="tuned", metadata={"steps": 5})
    places = {place: after for place, _, after in bundle_difference(bundle, other).fields}
    assert places["stage"] == "tuned"
    assert places["metadata.steps"] == 5


def test_a_tensor_of_another_shape_is_infinitely_far():
    small, large = small_bundle(), small_bundle()
    parameters = [*large.parameters[:-1]]
    cut = ModelBundle(
        large.config,
        large.tokenizer,
        parameters,
        large.weights[: sum(p.count for p in parameters)],
        stage="x",
    )
    assert bundle_difference(small, cut).tensors[-1].norm == np.inf
