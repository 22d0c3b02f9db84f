"""Checkpoints for tests: small ones, and `.riftckpt` bytes forged with the standard library."""

import hashlib
import io
import json
import zipfile
from typing import Any

import numpy as np

from artifacts import (
    AdamOptions,
    AdamState,
    AdamWOptions,
    BatchSourceState,
    LoraSpec,
    ModelConfig,
    MuonOptions,
    PackedNf4Weight,
    RandomState,
    StepState,
    TrainingCheckpoint,
)
from tests.artifacts.bundles import spell, zipped_entries
from tests.support import FIXTURES

NAMES = ("full", "lora", "qlora", "full-v1")
FULL, LORA, QLORA, FULL_V1 = ((FIXTURES / f"{name}.riftckpt").read_bytes() for name in NAMES)

CONFIG = ModelConfig(
    vocabulary_size=1, maximum_context=1, model_width=1, head_count=1, block_count=1, feed_forward_width=1
)
TARGETS = LoraSpec(rank=1, alpha=2.0, targets=("attention.value", "feed_forward.expand"), random_seed=3)
RANDOM = RandomState((0,) * 624 + (624,))


def adam_state(step: int = 3, **options: Any) -> AdamState:
    """Adam after some steps, with the powers that belong to them."""
    settings = AdamOptions(**options)
    return AdamState(settings, step, settings.beta1**step, settings.beta2**step)


def adamw_state(step: int = 3) -> StepState:
    """AdamW after some steps."""
    return StepState(AdamWOptions(learning_rate=0.1, weight_decay=0.0), step)


def muon_state(step: int = 3) -> StepState:
    """Muon after some steps."""
    return StepState(MuonOptions(learning_rate=0.1, matrix_learning_rate=0.02, weight_decay=0.3), step)


def packed_weight(rows: int = 1, columns: int = 1, **changes: Any) -> PackedNf4Weight:
    """A packed weight of ones, in one block of scale 1 at these sizes."""
    count = rows * columns
    codes = np.full((count + 1) // 2, 0xFF, np.uint8)
    if count % 2:
        codes[-1] = 0x0F
    parts: dict[str, Any] = {"codes": codes, "scales": np.ones(-(-count // 64), np.float32)}
    return PackedNf4Weight(**({"shape": (rows, columns), "block_size": 64} | parts | changes))


def small_checkpoint(**changes: Any) -> TrainingCheckpoint:
    """A valid checkpoint of 22 values, all trained; `changes` override its parts."""
    values = np.arange(22) / 8
    parts: dict[str, Any] = {"config": CONFIG, "values": values, "optimizer": adam_state()}
    parts |= {"first_moments": values / 4, "second_moments": values / 16, "python_random_state": RANDOM}
    return TrainingCheckpoint(**(parts | changes))


def muon_parts() -> dict[str, Any]:
    """The changes that make a small checkpoint one of Muon, which moves 6 of its 22 values."""
    return {"optimizer": muon_state(), "second_moments": np.arange(16) / 16}


def lora_parts(**changes: Any) -> dict[str, Any]:
    """The changes that make a small checkpoint train adapters on a dense base: two of [1, 1] each."""
    values = np.arange(4) / 2
    parts: dict[str, Any] = {"lora": TARGETS, "adapter_values": values}
    return parts | {"first_moments": -values, "second_moments": values} | changes


def qlora_parts(**changes: Any) -> dict[str, Any]:
    """The changes that make it train adapters on a packed base: 15 dense values, 7 packed weights."""
    packed = tuple(packed_weight() for _ in range(7))
    return lora_parts(values=np.arange(15) / 8, packed_weights=packed) | changes


def source(**changes: Any) -> BatchSourceState:
    """Where some source of batches stands."""
    parts: dict[str, Any] = {"source_type": "random_window", "fingerprint": "ab" * 32, "batches_emitted": 3}
    return BatchSourceState(**(parts | {"random_state": RANDOM} | changes))


def contents_of(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest in the bytes of a checkpoint, and its other members in file order."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    return json.loads(archive.read(names[0])), {name: archive.read(name) for name in names[1:]}


def identified(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the checkpoint id that its content has."""
    content = {key: value for key, value in manifest.items() if key != "checkpoint_id"}
    return content | {"checkpoint_id": hashlib.sha256(spell(content)).hexdigest()}


def described(manifest: dict[str, Any], members: dict[str, bytes]) -> dict[str, Any]:
    """The manifest with the sizes, counts and hashes that the members have."""
    entries = {}
    for name, data in members.items():
        entry = dict(manifest["members"].get(name, {}))
        entry |= {"size": len(data), "count": len(data) // (1 if name.endswith("nf4") else 4)}
        entries[name] = entry | {"sha256": hashlib.sha256(data).hexdigest()}
    return manifest | {"members": entries}


def sealed(manifest: dict[str, Any], members: dict[str, bytes], **info: Any) -> bytes:
    """The file of a manifest, with the id of its content, and of the members, as zipfile writes it."""
    entries = [("manifest.json", spell(identified(manifest))), *members.items()]
    return zipped_entries(entries, **info)
