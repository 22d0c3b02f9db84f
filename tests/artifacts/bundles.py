"""Bundles for tests: small ones, and `.rift` bytes forged with the standard library, not our own writer."""

import hashlib
import io
import json
import struct
import warnings
import zipfile
from typing import Any

import numpy as np

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from tests.support import FIXTURES

NAMES = ("byte", "bpe", "bpe-lora-child", "bpe-qlora-child", "edge")
EDGE = (FIXTURES / "edge.rift").read_bytes()

CONFIG = ModelConfig(
    vocabulary_size=3, maximum_context=2, model_width=2, head_count=1, block_count=1, feed_forward_width=1
)
TOKENIZER = TokenizerSpec("byte", (97, 98, 99))


def small_bundle(seed: int = 0, **changes: Any) -> ModelBundle:
    """A valid bundle of 62 weights; `changes` override its parts."""
    parameters = CONFIG.parameter_specs()
    count = sum(parameter.count for parameter in parameters)
    weights = np.random.default_rng(seed).standard_normal(count, np.float32)
    parts: dict[str, Any] = {
        "config": CONFIG,
        "tokenizer": TOKENIZER,
        "parameters": parameters,
        "weights": weights,
    }
    return ModelBundle(**parts | {"stage": "pretraining"} | changes)


def spell(value: Any) -> bytes:
    """Canonical JSON as the specification words it, by the standard library alone."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def identified(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the artifact id that its content has."""
    content = {key: value for key, value in manifest.items() if key != "artifact_id"}
    return content | {"artifact_id": hashlib.sha256(spell(content)).hexdigest()}


def manifest_of(data: bytes) -> dict[str, Any]:
    """The manifest in the bytes of a bundle."""
    return json.loads(zipfile.ZipFile(io.BytesIO(data)).read("manifest.json"))


def weights_of(data: bytes) -> bytes:
    """The weights in the bytes of a bundle."""
    return zipfile.ZipFile(io.BytesIO(data)).read("weights.f32le")


def zipped(manifest: bytes, weights: bytes, **info: Any) -> bytes:
    """Bundle bytes as CPython's zipfile writes them; `info` overrides fields of both entries."""
    return zipped_entries([("manifest.json", manifest), ("weights.f32le", weights)], **info)


def zipped_entries(entries: list[tuple[str, bytes]], **info: Any) -> bytes:
    """An archive of the entries with the header values of a bundle, or those in `info`."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(buffer, mode="w") as archive:  # same names
        for name, data in entries:
            entry = zipfile.ZipInfo(name, date_time=info.get("date_time", (1980, 1, 1, 0, 0, 0)))
            entry.create_system = info.get("create_system", 0)
            entry.external_attr = info.get("external_attr", 0)
            entry.compress_type = info.get("compress_type", zipfile.ZIP_STORED)
            entry.comment = info.get("comment", b"")
            entry.extra = info.get("extra", b"")
            archive.writestr(entry, data)
    return buffer.getvalue()


def float32(*values: float) -> bytes:
    """Little-endian float32 bytes."""
    return struct.pack(f"<{len(values)}f", *values)
