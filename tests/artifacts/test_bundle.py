"""Bundles: the original's files come back byte for byte, and a bundle is an immutable value."""

import hashlib
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from artifacts import BundleError, ModelBundle, ParameterSpec, TokenizerSpec
from tests.artifacts.bundles import (
    EDGE,
    NAMES,
    identified,
    manifest_of,
    small_bundle,
    spell,
    weights_of,
    zipped,
)
from tests.artifacts.json_values import texts, values
from tests.support import FIXTURES

finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_of_the_original_is_saved_again_to_the_same_bytes(name, tmp_path):
    path = FIXTURES / f"{name}.rift"
    bundle = ModelBundle.load(path)
    assert bundle.save(tmp_path / "again.rift").read_bytes() == path.read_bytes()
    assert bundle.to_bytes() == path.read_bytes()
    assert bundle == ModelBundle.from_bytes(path.read_bytes())
    manifest = manifest_of(path.read_bytes())
    assert bundle.artifact_id == manifest["artifact_id"]
    assert bundle.metadata == manifest["metadata"]


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_bundle_give_the_same_bundle(name):
    path = FIXTURES / f"{name}.rift"
    original = ModelBundle.load(path)
    rebuilt = ModelBundle(
        original.config,
        original.tokenizer,
        original.parameters,
        np.concatenate([tensor.ravel() for tensor in original.tensors().values()]),
        stage=original.stage,
        parent_artifact_id=original.parent_artifact_id,
        metadata=original.metadata,
    )
    assert rebuilt.to_bytes() == path.read_bytes()


def test_a_tuned_bundle_names_its_parent():
    parent, child = (ModelBundle.load(FIXTURES / f"{name}.rift") for name in ("bpe", "bpe-lora-child"))
    assert child.parent_artifact_id == parent.artifact_id
    assert parent.parent_artifact_id is None


def test_awkward_metadata_keeps_its_spelling():
    bundle = ModelBundle.from_bytes(EDGE)
    assert repr(bundle.metadata["z"]) == "[1, 1.0, -0.0, 1e+22, 1e-07, 0.1, 123456789012345678901234567890]"
    assert bundle.stage == "hand made – стадия"
    assert bundle.tokenizer == TokenizerSpec("byte", (122, 0, 255, 10))
    assert bundle.config.random_seed == 2**32 - 1


@settings(max_examples=40)
@given(
    weights=arrays.arrays(np.float32, 79, elements=finite_float32),
    stage=texts.filter(str.strip),
    parent=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
    metadata=st.dictionaries(texts, values, max_size=3),
)
def test_a_bundle_written_by_us_is_what_the_specification_says(weights, stage, parent, metadata):
    model = ModelBundle.from_bytes(EDGE)
    bundle = ModelBundle(
        model.config,
        model.tokenizer,
        model.parameters,
        weights,
        stage=stage,
        parent_artifact_id=parent,
        metadata=metadata,
    )
    data = weights.astype("<f4").tobytes()
    manifest = identified(
        manifest_of(EDGE)
        | {"stage": stage, "parent_artifact_id": parent, "metadata": metadata}
        | {"weights": manifest_of(EDGE)["weights"] | {"sha256": hashlib.sha256(data).hexdigest()}}
    )
    assert bundle.to_bytes() == zipped(spell(manifest), data)
    again = ModelBundle.from_bytes(bundle.to_bytes())
    assert again.artifact_id == bundle.artifact_id == manifest["artifact_id"]
    assert again.weights.tobytes() == weights.tobytes()


def test_negative_zero_and_denormals_keep_their_bits():
    weights = small_bundle().weights.copy()
    weights[:3] = [-0.0, 1e-45, 3.4028235e38]
    again = ModelBundle.from_bytes(small_bundle(weights=weights).to_bytes())
    assert again.weights.tobytes() == weights.tobytes()


def test_weights_are_rounded_from_float64_to_the_nearest_even():
    weights = small_bundle().weights.astype(np.float64)
    weights[:3] = [1 + 2**-24, 1 + 3 * 2**-24, 0.1]
    rounded = small_bundle(weights=weights).weights
    assert rounded[:3].tolist() == [1.0, 1 + 2**-22, np.float32(0.1)]
    integers = np.full(len(weights), 2**60 + 2**36 + 1)  # a tie once it is a float64, above one before
    assert set(small_bundle(weights=integers).weights.tolist()) == {2.0**60}


@pytest.mark.parametrize(
    ("metadata", "kept"),
    [
        (None, {}),
        ({"shape": (1, 2)}, {"shape": [1, 2]}),
        ({7: True}, {"7": True}),
        ({"nested": {"rate": 1e-5}}, {"nested": {"rate": 1e-05}}),
    ],
)
def test_metadata_is_kept_as_json(metadata, kept):
    assert small_bundle(metadata=metadata).metadata == kept


def test_a_bundle_cannot_be_changed():
    weights = small_bundle().weights.copy()
    metadata = {"list": [1]}
    bundle = small_bundle(weights=weights, metadata=metadata)
    before = bundle.to_bytes()
    weights[0] += 1
    metadata["list"].append(2)
    bundle.metadata["list"].append(3)
    for array in (bundle.weights, next(iter(bundle.tensors().values()))):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    with pytest.raises(AttributeError):
        bundle.stage = "other"  # type: ignore[misc]
    assert bundle.to_bytes() == before


def test_loaded_weights_cannot_be_changed_either():
    weights = ModelBundle.from_bytes(EDGE).weights
    with pytest.raises(ValueError, match="WRITEABLE"):
        weights.flags.writeable = True


def test_tensors_have_their_names_shapes_and_rows():
    bundle = ModelBundle.from_bytes(EDGE)
    tensors = bundle.tensors()
    assert list(tensors) == [parameter.name for parameter in bundle.parameters]
    assert [tensor.shape for tensor in tensors.values()] == [
        parameter.shape for parameter in bundle.parameters
    ]
    assert b"".join(tensor.tobytes() for tensor in tensors.values()) == weights_of(EDGE)


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "post_training"},
        {"parent_artifact_id": "0" * 64},
        {"metadata": {"a": 1}},
        {"tokenizer": TokenizerSpec("byte", (98, 97, 99))},
        {"seed": 1},
    ],
)
def test_every_part_enters_the_identity(change):
    assert small_bundle(**change) != small_bundle()
    assert hash(small_bundle()) == hash(small_bundle())
    assert small_bundle(metadata={"a": 1}) != small_bundle(metadata={"a": 1.0})
    assert small_bundle() != small_bundle().artifact_id


BAD_PARTS = [
    ({"weights": np.zeros(3)}, BundleError, "shape"),
    ({"weights": np.zeros((1, 62))}, BundleError, "shape"),
    ({"weights": np.full(62, np.nan)}, BundleError, "finite"),
    ({"weights": np.full(62, -np.inf)}, BundleError, "finite"),
    ({"weights": np.full(62, 1e39)}, BundleError, "finite"),
    ({"weights": np.zeros(62, bool)}, TypeError, "real numbers"),
    ({"weights": np.zeros(62, complex)}, TypeError, "real numbers"),
    ({"weights": np.full(62, "1")}, TypeError, "real numbers"),
    ({"tokenizer": TokenizerSpec("byte", (97, 98))}, BundleError, "vocabulary_size is 3"),
    ({"parameters": ()}, BundleError, "at least one"),
    ({"parameters": [ParameterSpec("w", (31,)), ParameterSpec("w", (31,))]}, BundleError, "twice"),
    ({"stage": " \n"}, BundleError, "blank"),
    ({"stage": 1}, TypeError, "stage"),
    ({"parent_artifact_id": "A" * 64}, BundleError, "parent"),
    ({"parent_artifact_id": "a" * 63}, BundleError, "parent"),
    ({"parent_artifact_id": 5}, BundleError, "parent"),
    ({"metadata": {"x": float("nan")}}, TypeError, "JSON"),
    ({"metadata": {"x": {1, 2}}}, TypeError, "JSON"),
    ({"metadata": 5}, TypeError, "metadata"),
    ({"metadata": {"x": "y" * 1_048_576}}, BundleError, "1048576"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_PARTS)
def test_parts_that_no_bundle_can_have_are_refused_when_it_is_made(change, error, message):
    with pytest.raises(error, match=message):
        small_bundle(**change)


def test_the_largest_manifest_is_exactly_one_mebibyte():
    room = 1_048_576 - len(spell(manifest_of(small_bundle(metadata={"x": ""}).to_bytes())))
    bundle = small_bundle(metadata={"x": "y" * room})
    assert ModelBundle.from_bytes(bundle.to_bytes()) == bundle
    with pytest.raises(BundleError, match="1048577"):
        small_bundle(metadata={"x": "y" * (room + 1)})


def test_renamed_parameters_load_because_only_a_model_can_judge_them():
    bundle = small_bundle(parameters=[ParameterSpec("everything", (62,))])
    assert ModelBundle.from_bytes(bundle.to_bytes()).parameters == (ParameterSpec("everything", (62,)),)


def test_saving_makes_the_folder_and_replaces_a_file_in_one_step(tmp_path):
    path = tmp_path / "new" / "folder" / "model.rift"
    assert small_bundle(0).save(path) == path
    assert small_bundle(1).save(str(path)) == path
    assert ModelBundle.load(path) == small_bundle(1)
    assert os.listdir(path.parent) == ["model.rift"]


def test_saving_onto_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        small_bundle().save(tmp_path)


def test_what_is_not_a_regular_file_is_not_found(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent.rift", tmp_path, tmp_path / "pipe", tmp_path / "absent" / "x"):
        with pytest.raises(FileNotFoundError, match=str(path)):
            ModelBundle.load(path)


def test_an_error_names_the_file(tmp_path):
    path = tmp_path / "broken.rift"
    path.write_bytes(EDGE[:-1])
    with pytest.raises(BundleError, match=r"broken\.rift"):
        ModelBundle.load(path)


def test_a_bundle_is_introduced_by_its_id():
    assert repr(ModelBundle.from_bytes(EDGE)).startswith("ModelBundle(13a66327714e")
