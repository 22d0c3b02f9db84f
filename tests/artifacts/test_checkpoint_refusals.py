"""The strict reader of checkpoints: every change is refused, with a code that says what is wrong."""

import contextlib
import functools
import json
import re
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import CheckpointError, TrainingCheckpoint
from artifacts.checkpoint_manifest import CheckpointManifest
from artifacts.packed_nf4 import decode_packed, encode_packed
from tests.artifacts.bundles import float32, spell, zipped_entries
from tests.artifacts.checkpoints import (
    FULL,
    FULL_V1,
    LORA,
    QLORA,
    contents_of,
    described,
    identified,
    muon_parts,
    qlora_parts,
    sealed,
    small_checkpoint,
)

MANIFEST, MEMBERS = contents_of(QLORA)
ENTRIES = [("manifest.json", spell(MANIFEST)), *MEMBERS.items()]
PACKED = "model-nf4.rtnf4"
MUON = small_checkpoint(**muon_parts()).to_bytes()


def refusal(data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        TrainingCheckpoint.from_bytes(data)
    return caught.value


def accepted_flips(original: bytes, first: int, end: int) -> list[int]:
    """The bits of these bytes that can be flipped and the file still be read."""
    data, accepted = bytearray(original), []
    for position in range(8 * first, 8 * end):
        data[position // 8] ^= 1 << position % 8
        with contextlib.suppress(CheckpointError):
            TrainingCheckpoint.from_bytes(bytes(data))
            accepted.append(position)
        data[position // 8] ^= 1 << position % 8
    assert data == original
    return accepted


def test_every_flipped_bit_of_a_small_checkpoint_is_refused(monkeypatch):
    decode = functools.cache(CheckpointManifest.decode)  # a function of the bytes alone; most flips spare it
    monkeypatch.setattr(CheckpointManifest, "decode", decode)
    original = small_checkpoint(**qlora_parts()).to_bytes()
    assert accepted_flips(original, 0, len(original)) == []


def test_every_flipped_bit_of_what_version_3_changes_is_refused():
    first = MUON.index(b'"optimizer":')
    assert accepted_flips(MUON, first, MUON.index(b'"python_random_state":')) == []
    assert accepted_flips(MUON, MUON.index(b'"format_version":3'), MUON.index(b'"global_step"')) == []


@given(st.integers(0, len(QLORA) - 1))
def test_every_shorter_file_is_refused(length):
    assert refusal(QLORA[:length]).code == "truncated"


@given(st.binary(min_size=1, max_size=64))
def test_bytes_behind_or_before_a_checkpoint_are_refused(extra):
    assert refusal(QLORA + extra).code == "trailing-bytes"
    assert refusal(extra + QLORA).code in ("not-zip", "container", "manifest-size", "truncated")


def swapped(first: int, second: int) -> list[tuple[str, bytes]]:
    entries = list(ENTRIES)
    entries[first], entries[second] = entries[second], entries[first]
    return entries


CONTAINERS = {
    "another date": (zipped_entries(ENTRIES, date_time=(2024, 5, 6, 7, 8, 10)), "container"),
    "made on unix": (zipped_entries(ENTRIES, create_system=3), "container"),
    "a symlink": (zipped_entries(ENTRIES, external_attr=0o120777 << 16), "container"),
    "compressed": (zipped_entries(ENTRIES, compress_type=zipfile.ZIP_DEFLATED), "container"),
    "comments": (zipped_entries(ENTRIES, comment=b"hello"), "trailing-bytes"),
    "an archive comment": (QLORA[:-2] + b"\x05\x00hello", "trailing-bytes"),
    "a member too many": (zipped_entries([*ENTRIES, ("x", b"")]), "trailing-bytes"),
    "a member missing": (zipped_entries(ENTRIES[:-1]), "truncated"),
    "a member twice": (zipped_entries([*ENTRIES, ENTRIES[-1]]), "trailing-bytes"),
    "the manifest second": (zipped_entries(swapped(0, 1)), "container"),
    "moments exchanged": (zipped_entries(swapped(4, 5)), "checksum"),
    "adapter and packed state exchanged": (zipped_entries(swapped(2, 3)), "checksum"),
    "a renamed member": (
        zipped_entries([("model.f32xx" if n == "model.f32le" else n, d) for n, d in ENTRIES]),
        "container",
    ),
    "a bundle": (sealed({"format": "riftco-transformer-model-bundle"}, {}), "manifest"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_another_container_of_the_same_content_is_refused(name):
    data, code = CONTAINERS[name]
    error = refusal(data)
    assert error.code == code, str(error)


def changed(base: bytes = QLORA, **changes) -> bytes:
    """A checkpoint whose manifest has other content and the id that belongs to it."""
    manifest, members = contents_of(base)
    return sealed(manifest | changes, members)


def model(base: bytes = QLORA, **changes) -> bytes:
    return changed(base, model=contents_of(base)[0]["model"] | changes)


def optimizer(**changes) -> bytes:
    return changed(optimizer=MANIFEST["optimizer"] | changes)


def options(**changes) -> bytes:
    return optimizer(options=MANIFEST["optimizer"]["options"] | changes)


def config(**changes) -> bytes:
    return model(config=MANIFEST["model"]["config"] | changes)


def lora(**changes) -> bytes:
    return model(lora=MANIFEST["model"]["lora"] | changes)


def random_state(**changes) -> bytes:
    return changed(python_random_state=MANIFEST["python_random_state"] | changes)


def batch_source(**changes) -> bytes:
    return changed(batch_source=MANIFEST["batch_source"] | changes)


def member(name: str, **changes) -> bytes:
    return changed(members=MANIFEST["members"] | {name: MANIFEST["members"][name] | changes})


def first_parameter(**changes) -> bytes:
    first, *rest = MANIFEST["model"]["parameters"]
    return model(parameters=[first | changes, *rest])


def without(key: str) -> bytes:
    return sealed({k: v for k, v in MANIFEST.items() if k != key}, MEMBERS)


def respelled(old: bytes, new: bytes, manifest: dict = MANIFEST) -> bytes:
    data = spell(manifest).replace(old, new, 1)
    assert data != spell(manifest)
    return zipped_entries([("manifest.json", data), *MEMBERS.items()])


def muon(**changes) -> bytes:
    return changed(MUON, optimizer=contents_of(MUON)[0]["optimizer"] | changes)


def muon_options(**changes) -> bytes:
    return muon(options=contents_of(MUON)[0]["optimizer"]["options"] | changes)


WORDS = MANIFEST["python_random_state"]["internal"]
HUGE = 10**4000

MANIFESTS = {
    "another format": (changed(format="other"), "format"),
    "version 3 of Adam": (changed(format_version=3), "optimizer"),
    "version 4": (changed(format_version=4), "format"),
    "version true": (changed(FULL_V1, format_version=True), "format"),
    "version 2.0": (changed(format_version=2.0), "format"),
    "version 1 with a packed state": (changed(format_version=1), "manifest"),
    "version 1 with the key of version 2": (changed(FULL, format_version=1), "manifest"),
    "version 2 without its key": (changed(FULL_V1, format_version=2), "manifest"),
    "another boundary": (changed(boundary="pre_optimizer_step"), "boundary"),
    "an unknown key": (changed(extra=1), "manifest"),
    **{f"no {key}": (without(key), "manifest") for key in sorted(MANIFEST) if key != "checkpoint_id"},
    "another id": (respelled(MANIFEST["checkpoint_id"].encode(), b"0" * 64), "id"),
    "an id that is a list": (respelled(b'"' + MANIFEST["checkpoint_id"].encode() + b'"', b"[]"), "id"),
    "a negative step": (changed(global_step=-1), "manifest"),
    "a true step": (changed(global_step=True), "manifest"),
    "a float step": (changed(global_step=105.0), "manifest"),
    "metadata that is an array": (changed(metadata=[]), "manifest"),
    "a list as model": (changed(model=[]), "manifest"),
    "a list as optimizer": (changed(optimizer=[]), "manifest"),
    "a list as members": (changed(members=[]), "manifest"),
    "other attention": (model(full_sequence_attention="linear"), "manifest"),
    "attention in a list": (model(full_sequence_attention=["flash"]), "manifest"),
    "other activation checkpointing": (model(activation_checkpointing=None), "manifest"),
    "quantized 1": (model(quantized=1), "members"),
    "quantized false": (model(quantized=False), "members"),
    "another values file": (model(values_file="../model.f32le"), "model"),
    "another packed file": (model(packed_state_file=None), "model"),
    "another adapter file": (model(adapter_values_file=None), "model"),
    "a model key too many": (model(tied=False), "manifest"),
    "another context": (config(maximum_context=7), "model"),
    "a billion blocks": (config(block_count=10**9), "manifest"),
    "a huge width": (config(model_width=HUGE), "model"),
    "huge vocabulary": (config(vocabulary_size=2**32), "model"),
    "an integer epsilon": (config(layer_norm_epsilon=1), "manifest"),
    "parameters in an object": (model(parameters={}), "manifest"),
    "a parameter missing": (model(parameters=MANIFEST["model"]["parameters"][:-1]), "model"),
    "a parameter renamed": (first_parameter(name="w"), "model"),
    "another shape": (first_parameter(shape=[8, 17]), "model"),
    "another offset": (first_parameter(offset=1), "model"),
    "a float count": (first_parameter(count=136.0), "id"),
    "a false offset": (first_parameter(offset=False), "id"),
    "no adapters": (model(lora=None), "lora"),
    "adapters on a full run": (model(FULL, lora=MANIFEST["model"]["lora"]), "members"),
    "another rank": (lora(rank=1), "model"),
    "too large a rank": (lora(rank=9), "lora"),
    "a huge rank": (lora(rank=HUGE), "manifest"),
    "an integer alpha": (lora(alpha=4), "id"),
    "an alpha that is no float32": (lora(alpha=4.1), "model"),
    "targets out of order": (lora(targets=["attention.value", "attention.query"]), "model"),
    "a target too many": (lora(targets=["attention.query", "attention.value", "attention.key"]), "model"),
    "an unknown target": (lora(targets=["attention.query", "mlp"]), "manifest"),
    "a target in a list": (lora(targets=[["attention.query"]]), "manifest"),
    "another optimizer": (optimizer(type="adamw"), "optimizer"),
    "another scope": (optimizer(scope="model"), "optimizer"),
    "another moments file": (optimizer(first_moments_file="x"), "optimizer"),
    "an optimizer key too many": (optimizer(weight_decay=0.0), "manifest"),
    "another step count": (optimizer(step_count=6), "manifest"),
    "a huge step count": (optimizer(step_count=HUGE), "manifest"),
    "another power": (optimizer(beta1_power=0.5), "manifest"),
    "an integer power": (optimizer(step_count=0, beta1_power=1, beta2_power=1.0), "manifest"),
    "a huge power": (optimizer(beta1_power=HUGE), "manifest"),
    "an integer learning rate": (options(learning_rate=1), "id"),
    "a learning rate that is no float32": (options(learning_rate=0.01), "optimizer"),
    "a negative learning rate": (options(learning_rate=-1.0), "manifest"),
    "a huge learning rate": (options(learning_rate=HUGE), "manifest"),
    "a beta of one": (options(beta1=1.0), "manifest"),
    "an unknown storage": (options(state_storage="disk"), "manifest"),
    "no pages": (options(page_size=0), "manifest"),
    "an option too many": (options(amsgrad=False), "manifest"),
    "version 3 of Muon as version 2": (changed(MUON, format_version=2), "optimizer"),
    "Muon as AdamW": (muon(type="adamw"), "manifest"),
    "Muon as Adam": (muon(type="adam"), "optimizer"),
    "an optimizer in a list": (muon(type=["muon"]), "optimizer"),
    "Muon without a type": (muon(type=None), "optimizer"),
    "Muon with powers": (muon(beta1_power=1.0), "manifest"),
    "Muon after a negative step": (muon(step_count=-1), "manifest"),
    "Muon after a huge step": (muon(step_count=HUGE), "manifest"),
    "Muon of another scope": (muon(scope="adapter"), "optimizer"),
    "Muon with another moments file": (muon(second_moments_file="x"), "optimizer"),
    "Muon without decay": (muon_options(weight_decay=None), "manifest"),
    "a decay of minus zero": (muon_options(weight_decay=-0.0), "id"),
    "an integer rate of Muon": (muon_options(matrix_learning_rate=1), "id"),
    "a momentum of one": (muon_options(momentum=1.0), "manifest"),
    "an option of Muon too many": (muon_options(page_size=1), "manifest"),
    "a random state of version 2": (random_state(version=2), "manifest"),
    "a word too few": (random_state(internal=WORDS[1:]), "manifest"),
    "a word too large": (random_state(internal=[2**32, *WORDS[1:]]), "manifest"),
    "a negative word": (random_state(internal=[-1, *WORDS[1:]]), "manifest"),
    "an index too large": (random_state(internal=[*WORDS[:-1], 625]), "manifest"),
    "an integer gauss": (random_state(gauss_next=1), "manifest"),
    "no random state": (changed(python_random_state=None), "manifest"),
    "a blank source type": (batch_source(source_type=""), "manifest"),
    "a short fingerprint": (batch_source(fingerprint="ab"), "manifest"),
    "negative batches": (batch_source(batches_emitted=-1), "manifest"),
    "a source without a random state": (batch_source(random_state=None), "manifest"),
    "another size": (member("adapter.f32le", size=252), "members"),
    "another count": (member("adapter.f32le", count=63), "members"),
    "another dtype": (member("adapter.f32le", dtype="float16"), "members"),
    "another byte order": (member("adapter.f32le", byte_order="big"), "members"),
    "another encoding": (member(PACKED, encoding="riftco-packed-nf4-v2"), "members"),
    "a byte order of the packed state": (member(PACKED, byte_order="little"), "members"),
    "no packed bytes": (member(PACKED, size=0), "manifest"),
    "packed bytes beyond the file": (member(PACKED, size=2**62, count=2**62), "truncated"),
    "absurdly many packed bytes": (member(PACKED, size=HUGE, count=HUGE), "truncated"),
    "another hash": (member("adapter.f32le", sha256="0" * 64), "checksum"),
    "another hash of the packed state": (member(PACKED, sha256="0" * 64), "checksum"),
    "an upper-case hash": (member("adapter.f32le", sha256="A" * 64), "manifest"),
    "a member without description": (
        changed(members=MANIFEST["members"] | {"adapter.f32le": None}),
        "members",
    ),
    "a member that is not in the file": (changed(members=MANIFEST["members"] | {"x": {}}), "members"),
    "a key twice": (respelled(b'"boundary"', b'"boundary":"post_optimizer_step","boundary"'), "json"),
    "NaN": (respelled(b'"gauss_next":null', b'"gauss_next":NaN'), "json"),
    "a number spelled otherwise": (respelled(b'"alpha":4.0', b'"alpha":4.00'), "not-canonical"),
    "a space": (respelled(b":", b": "), "not-canonical"),
    "a newline at the end": (respelled(b'"version":3}}', b'"version":3}}\n'), "not-canonical"),
    "a manifest over 1 MiB": (changed(metadata={"x": "y" * 1_048_576}), "manifest-size"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_breaks_a_rule_is_refused_even_with_its_own_id(name):
    data, code = MANIFESTS[name]
    error = refusal(data)
    assert error.code == code, str(error)


def with_member(name: str, data: bytes) -> bytes:
    members = MEMBERS | {name: data}
    return sealed(described(MANIFEST, members), members)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != PACKED])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(name, value):
    assert refusal(with_member(name, MEMBERS[name][:-4] + float32(value))).code == "not-finite"


def test_packed_bytes_may_spell_what_is_no_float():
    first, *rest = decode_packed(MEMBERS[PACKED])
    packed = encode_packed([replace(first, codes=np.full_like(first.codes, 0xFF)), *rest])
    assert np.isnan(np.frombuffer(packed, "<f4", 1, 96))
    assert TrainingCheckpoint.from_bytes(with_member(PACKED, packed)).packed_weights[0].codes[0] == 0xFF


@pytest.mark.parametrize("name", MEMBERS)
def test_other_sizes_are_refused_even_with_their_own_description(name):
    assert refusal(with_member(name, MEMBERS[name][:-4])).code in ("members", "packed")
    assert refusal(with_member(name, MEMBERS[name] + b"\0" * 4)).code in ("members", "packed")


def test_a_packed_state_that_breaks_its_rules_is_refused():
    assert refusal(with_member(PACKED, b"x" + MEMBERS[PACKED][1:])).code == "packed"
    transposed = with_member(
        PACKED, MEMBERS[PACKED].replace(b"\x0c" + b"\0" * 7 + b"\x08", b"\x08" + b"\0" * 7 + b"\x0c")
    )
    assert "must have the shapes" in str(refusal(transposed))


@pytest.mark.parametrize(
    "key", ["full_sequence_attention", "values_file", "boundary", "checkpoint_id", "metadata"]
)
def test_deep_nesting_is_refused_without_a_crash(key):
    old = re.search(rb'"%s":("[^"]*"|{.*?})' % key.encode(), spell(MANIFEST)).group(0)
    for depth in [50, 500, *range(900, 1000, 3), 50_000]:
        refusal(respelled(old, b'"%s":' % key.encode() + b"[" * depth + b"]" * depth))
    for depth in [50, 500, *range(900, 1000, 3), 50_000]:
        refusal(respelled(b'"metadata":{', b'"metadata":{"deep":' + b"[" * depth + b"]" * depth + b","))


def test_forged_sizes_allocate_nothing():
    forged = [
        member(PACKED, size=2**40, count=2**40),
        config(block_count=10**9),
        config(model_width=2**40, head_count=1),
        lora(rank=2**60),
        with_member(PACKED, MEMBERS[PACKED][:32] + b"\xff" * 7 + b"\x3f" + MEMBERS[PACKED][40:]),
    ]
    for data in forged:
        tracemalloc.start()
        refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20


@pytest.mark.parametrize("data", [FULL, FULL_V1, LORA, QLORA])
def test_the_helpers_of_these_tests_build_the_real_checkpoint(data):
    assert sealed(*contents_of(data)) == data
    manifest, members = contents_of(data)
    assert identified(described(manifest, members)) == manifest
    assert json.loads(spell(manifest)) == manifest
