"""Checkpoints: the original's files come back byte for byte, and a checkpoint is an immutable value."""

import os
import random

import numpy as np
import pytest

from artifacts import CheckpointError, TrainingCheckpoint
from tests.artifacts.checkpoints import (
    CONFIG,
    FULL,
    FULL_V1,
    LORA,
    NAMES,
    QLORA,
    adam_state,
    adamw_state,
    contents_of,
    lora_parts,
    muon_parts,
    muon_state,
    packed_weight,
    qlora_parts,
    sealed,
    small_checkpoint,
    source,
)
from tests.support import FIXTURES, fixture

KINDS = {"full": {}, "lora": lora_parts(), "qlora": qlora_parts(), "v1": {"format_version": 1}}
KINDS |= {"adamw": {"optimizer": adamw_state()}, "muon": muon_parts()}
KINDS |= {"muon over adapters": qlora_parts(optimizer=muon_state())}


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_original_is_saved_again_to_the_same_bytes(name, tmp_path):
    path = FIXTURES / f"{name}.riftckpt"
    checkpoint = TrainingCheckpoint.load(path)
    assert checkpoint.save(tmp_path / "again.riftckpt").read_bytes() == path.read_bytes()
    assert checkpoint.to_bytes() == path.read_bytes()
    assert checkpoint == TrainingCheckpoint.from_bytes(path.read_bytes())
    manifest, _ = contents_of(path.read_bytes())
    assert checkpoint.checkpoint_id == manifest["checkpoint_id"]
    assert checkpoint.metadata == manifest["metadata"]
    assert checkpoint.format_version == manifest["format_version"]


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_checkpoint_give_the_same_checkpoint(name):
    path = FIXTURES / f"{name}.riftckpt"
    original = TrainingCheckpoint.load(path)
    rebuilt = TrainingCheckpoint(
        original.config,
        np.concatenate([tensor.ravel() for tensor in original.tensors().values()]),
        optimizer=original.optimizer,
        first_moments=np.concatenate([x.ravel() for x in original.first_moment_tensors().values()]),
        second_moments=np.concatenate([x.ravel() for x in original.second_moment_tensors().values()]),
        python_random_state=original.python_random_state,
        lora=original.lora,
        adapter_values=original.adapter_values,
        packed_weights=original.packed_weights,
        batch_source=original.batch_source,
        global_step=original.global_step,
        full_sequence_attention=original.full_sequence_attention,
        activation_checkpointing=original.activation_checkpointing,
        metadata=original.metadata,
        format_version=original.format_version,
    )
    assert rebuilt.to_bytes() == path.read_bytes()


def test_the_fixtures_say_what_they_were_made_of():
    full, lora, qlora = map(TrainingCheckpoint.from_bytes, (FULL, LORA, QLORA))
    assert (full.global_step, full.optimizer.step_count, full.optimizer.options.page_size) == (105, 5, 10)
    assert full.optimizer.options.learning_rate == float(np.float32(0.01))
    assert full.trained_parameters == full.parameters == full.config.parameter_specs()
    assert full.batch_source.source_type == "random_window"
    assert (full.lora, full.adapter_values, full.adapter_tensors(), full.packed_weights) == (
        None,
        None,
        {},
        None,
    )
    assert lora.lora.targets == ("attention.query", "attention.value")
    assert lora.trained_parameters == lora.adapter_parameters
    assert list(lora.first_moment_tensors()) == list(lora.adapter_tensors())
    assert lora.adapter_tensors()["blocks.0.attention.value.lora_b.weight"].shape == (8, 2)
    assert [weight.shape for weight in qlora.packed_weights] == [*[(8, 8)] * 4, (12, 8), (8, 12), (17, 8)]
    assert len(qlora.parameters) == 15
    assert full.values.size == 885


@pytest.mark.parametrize("name", ["full", "lora", "qlora"])
def test_the_random_state_continues_the_original_sequence(name):
    generator = random.Random()
    generator.setstate(TrainingCheckpoint.load(FIXTURES / f"{name}.riftckpt").python_random_state.to_python())
    expected = fixture("checkpoints.json")[f"{name}.riftckpt"]["python_random_next"]
    assert [generator.random() for _ in expected] == expected


def test_versions_of_the_same_state_differ_only_in_their_ids():
    first, second = TrainingCheckpoint.from_bytes(FULL_V1), TrainingCheckpoint.from_bytes(FULL)
    assert first != second
    assert first.values.tobytes() == second.values.tobytes()
    assert first.first_moment_tensors().keys() == second.second_moment_tensors().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_written_by_us_is_what_the_specification_says(kind):
    data = small_checkpoint(**KINDS[kind]).to_bytes()
    assert sealed(*contents_of(data)) == data
    again = TrainingCheckpoint.from_bytes(data)
    assert again == small_checkpoint(**KINDS[kind])
    assert again.to_bytes() == data
    manifest, members = contents_of(data)
    for name, content in members.items():
        described = manifest["members"][name]
        assert (described["size"], described["count"] * (1 if name.endswith("nf4") else 4)) == (
            len(content),
        ) * 2


@pytest.mark.parametrize(("kind", "version"), [("full", 2), ("qlora", 2), ("adamw", 3), ("muon", 3)])
def test_adam_is_written_as_the_version_that_the_original_reads_and_the_others_as_ours(kind, version):
    made = small_checkpoint(**KINDS[kind])
    manifest, members = contents_of(made.to_bytes())
    assert manifest["format_version"] == made.format_version == version
    assert manifest["optimizer"]["type"] == made.optimizer.name
    assert ("beta1_power" in manifest["optimizer"]) is (version == 2)
    first, second = members["adam-first-moments.f32le"], members["adam-second-moments.f32le"]
    assert len(first) - len(second) == (24 if kind == "muon" else 0)
    assert made.second_moment_tensors().keys() <= made.first_moment_tensors().keys()
    assert ("blocks.0.attention.query.weight" in made.second_moment_tensors()) is (kind in ("full", "adamw"))


def test_members_and_parameters_come_in_the_order_of_the_format():
    manifest, members = contents_of(small_checkpoint(**qlora_parts()).to_bytes())
    assert list(members) == [
        "model.f32le",
        "model-nf4.rtnf4",
        "adapter.f32le",
        "adam-first-moments.f32le",
        "adam-second-moments.f32le",
    ]
    assert [entry["name"] for entry in manifest["model"]["adapter_parameters"]] == [
        f"blocks.0.{projection}.lora_{side}.weight"
        for projection in ("attention.value", "feed_forward.expand")
        for side in "ab"
    ]


def test_the_global_step_is_that_of_adam_unless_given():
    assert small_checkpoint().global_step == 3
    assert small_checkpoint(global_step=0).global_step == 0


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.arange(22)},
        {"first_moments": np.arange(22)},
        {"second_moments": np.arange(22)},
        {"optimizer": adam_state(4)},
        {"optimizer": adam_state(learning_rate=1.0)},
        {"optimizer": adamw_state()},
        muon_parts(),
        {"global_step": 4},
        {"batch_source": source()},
        {"full_sequence_attention": "flash"},
        {"activation_checkpointing": "block"},
        {"metadata": {"a": 1}},
        {"format_version": 1},
        lora_parts(),
        qlora_parts(),
    ],
)
def test_every_part_enters_the_identity(change):
    assert small_checkpoint(**change) != small_checkpoint()
    assert hash(small_checkpoint(**change)) == hash(small_checkpoint(**change))


def test_a_checkpoint_cannot_be_changed():
    values, metadata = np.arange(22, dtype=np.float32), {"list": [1]}
    made = small_checkpoint(values=values, metadata=metadata)
    before = made.to_bytes()
    values[0] += 1
    metadata["list"].append(2)
    made.metadata["list"].append(3)
    packed = TrainingCheckpoint.from_bytes(QLORA)
    arrays = [made.values, made.first_moments, packed.values, packed.adapter_values, packed.second_moments]
    arrays += [packed.packed_weights[0].codes, packed.packed_weights[0].scales.scales]
    arrays += [next(iter(made.tensors().values())), next(iter(packed.second_moment_tensors().values()))]
    for array in arrays:
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    with pytest.raises(AttributeError):
        made.global_step = 1  # type: ignore[misc]
    assert made.to_bytes() == before


def test_bytes_that_change_later_do_not_change_the_checkpoint():
    data = bytearray(FULL)
    checkpoint = TrainingCheckpoint.from_bytes(data)  # type: ignore[arg-type]
    data[:] = bytes(len(data))
    assert checkpoint.to_bytes() == FULL


def test_values_are_rounded_from_float64_and_keep_their_bits():
    values = np.arange(22, dtype=np.float64)
    values[:3] = [-0.0, 1 + 2**-24, 1e-45]
    made = small_checkpoint(values=values).values
    assert made[:3].tobytes() == np.array([-0.0, 1.0, 1e-45], "<f4").tobytes()


BAD_PARTS = [
    ({"values": np.arange(21)}, CheckpointError, r"values of shape \(22,\)"),
    ({"values": np.zeros((1, 22))}, CheckpointError, "shape"),
    ({"first_moments": np.arange(4)}, CheckpointError, "first_moments of shape"),
    ({"second_moments": np.arange(4)}, CheckpointError, "second_moments of shape"),
    ({"values": np.full(22, np.nan)}, CheckpointError, "values must be finite"),
    ({"first_moments": np.full(22, np.inf)}, CheckpointError, "first_moments must be finite"),
    ({"second_moments": np.full(22, 1e39)}, CheckpointError, "second_moments must be finite"),
    ({"values": np.zeros(22, bool)}, TypeError, "real numbers"),
    (lora_parts(adapter_values=None), CheckpointError, "neither"),
    ({"adapter_values": np.arange(4)}, CheckpointError, "neither"),
    (lora_parts(adapter_values=np.arange(5)), CheckpointError, "adapter_values of shape"),
    (lora_parts(first_moments=np.arange(22)), CheckpointError, r"first_moments of shape \(4,\)"),
    ({"packed_weights": [packed_weight()] * 7, "values": np.arange(15)}, CheckpointError, "adapters"),
    (qlora_parts(format_version=1), CheckpointError, "version 1 has no packed"),
    (qlora_parts(values=np.arange(22)), CheckpointError, r"values of shape \(15,\)"),
    (qlora_parts(packed_weights=[packed_weight()] * 6), CheckpointError, "must have the shapes"),
    (qlora_parts(packed_weights=[packed_weight(2)] * 7), CheckpointError, "must have the shapes"),
    ({"global_step": -1}, CheckpointError, "global_step"),
    ({"global_step": True}, TypeError, "global_step"),
    ({"format_version": 4}, CheckpointError, "format_version"),
    ({"format_version": 3}, CheckpointError, "version 3 is of no adam"),
    ({"format_version": 2, "optimizer": adamw_state()}, CheckpointError, "version 2 is of no adamw"),
    ({"format_version": 1, **muon_parts()}, CheckpointError, "version 1 is of no muon"),
    ({"optimizer": muon_state()}, CheckpointError, r"second_moments of shape \(16,\)"),
    ({"optimizer": {}}, TypeError, "optimizer"),
    ({"full_sequence_attention": "other"}, CheckpointError, "full_sequence_attention"),
    ({"activation_checkpointing": "all"}, CheckpointError, "activation_checkpointing"),
    ({"python_random_state": random.getstate()}, TypeError, "python_random_state"),
    ({"batch_source": {}}, TypeError, "batch_source"),
    ({"config": {}}, TypeError, "config"),
    ({"metadata": {"x": float("nan")}}, TypeError, "JSON"),
    ({"metadata": {"x": "y" * 1_048_576}}, CheckpointError, "1048576"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_PARTS)
def test_parts_that_no_checkpoint_can_have_are_refused_when_it_is_made(change, error, message):
    with pytest.raises(error, match=message):
        small_checkpoint(**change)


def test_adapters_wider_than_a_projection_are_refused():
    wide = lora_parts()["lora"]
    with pytest.raises(CheckpointError, match="rank 2 exceeds"):
        small_checkpoint(**lora_parts(lora=type(wide)(2, 4.0, ("attention.query",))))


def test_saving_syncs_the_file_before_its_name_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.fstat(fd).st_mode & 0o040000), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    path = tmp_path / "run.riftckpt"
    assert small_checkpoint().save(path) == path
    assert calls[-3:] == [0, "replace", 0o040000]
    assert small_checkpoint(global_step=9).save(str(path)) == path
    assert TrainingCheckpoint.load(path).global_step == 9
    assert os.listdir(tmp_path) == ["run.riftckpt"]


def test_a_loaded_checkpoint_can_be_saved_onto_its_own_file(tmp_path):
    path = small_checkpoint(**qlora_parts()).save(tmp_path / "run.riftckpt")
    loaded = TrainingCheckpoint.load(path)
    loaded.save(path)
    small_checkpoint().save(path)
    assert loaded.to_bytes() == small_checkpoint(**qlora_parts()).to_bytes()


def test_what_is_not_a_regular_file_is_not_found(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe"):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            TrainingCheckpoint.load(path)


def test_an_error_names_the_file(tmp_path):
    path = tmp_path / "broken.riftckpt"
    path.write_bytes(FULL[:-1])
    with pytest.raises(CheckpointError, match=r"broken\.riftckpt: has 28052 bytes"):
        TrainingCheckpoint.load(path)


def test_a_checkpoint_is_introduced_by_its_id_and_step():
    assert repr(TrainingCheckpoint.from_bytes(FULL)) == "TrainingCheckpoint(58361bb51919, global_step=105)"
    assert small_checkpoint().config == CONFIG
