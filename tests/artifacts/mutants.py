"""Mutants of artifacts: damaged, forged and respelled files, each a function of its number.

Blind mutants change bytes. Forged ones change what the bytes mean (a value of the manifest, a member, a field
of a header, the packed state) and put sizes, checksums, hashes and ids right again, so that they get past the
outer checks and meet the rules behind them.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artifacts import ArtifactError, BundleError, CheckpointError, ModelBundle, TrainingCheckpoint
from tests.artifacts import bundles, checkpoints
from tests.artifacts.bundles import EDGE, float32, small_bundle, spell, zipped_entries
from tests.artifacts.checkpoints import (
    FULL_V1,
    QLORA,
    adamw_state,
    contents_of,
    described,
    lora_parts,
    muon_parts,
    qlora_parts,
    small_checkpoint,
    source,
)

Contents = tuple[dict[str, Any], dict[str, bytes]]


@dataclass(frozen=True)
class Kind:
    """One format: how it is read, what it may raise, and how a manifest is put right."""

    read: Callable[[bytes], ModelBundle | TrainingCheckpoint]
    error: type[ArtifactError]
    identified: Callable[[dict[str, Any]], dict[str, Any]]
    described: Callable[[dict[str, Any], dict[str, bytes]], dict[str, Any]]
    seeds: tuple[bytes, ...]
    id_key: str


def _described_bundle(manifest: dict[str, Any], members: dict[str, bytes]) -> dict[str, Any]:
    entry = described({"members": {"weights.f32le": manifest["weights"]}}, members)["members"][
        "weights.f32le"
    ]
    return manifest | {"weights": {key: value for key, value in entry.items() if key != "size"}}


BUNDLES = Kind(
    ModelBundle.from_bytes,
    BundleError,
    bundles.identified,
    _described_bundle,
    (EDGE, small_bundle().to_bytes(), small_bundle(metadata={"a": [1, 1.5, None]}).to_bytes()),
    "artifact_id",
)
CHECKPOINTS = Kind(
    TrainingCheckpoint.from_bytes,
    CheckpointError,
    checkpoints.identified,
    described,
    (
        small_checkpoint().to_bytes(),
        small_checkpoint(batch_source=source(), metadata={"a": [1, 1.5]}).to_bytes(),
        small_checkpoint(**lora_parts()).to_bytes(),
        small_checkpoint(**qlora_parts()).to_bytes(),
        small_checkpoint(**muon_parts()).to_bytes(),
        small_checkpoint(**qlora_parts(optimizer=adamw_state())).to_bytes(),
        QLORA,
        FULL_V1,
    ),
    "checkpoint_id",
)

_NUMBERS = [0, 1, -1, 2, 7, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1, 10**400, 10**4290]
_VALUES = [
    *_NUMBERS,
    *(0.0, -0.0, 1.0, 0.5, 1e-5, 1e-45, 1e-320, 1e38, 1e300, -1.0),
    *(
        None,
        True,
        False,
        "",
        " ",
        "x",
        "0" * 64,
        "manifest.json",
        "../x",
        "\u2028",
        [],
        {},
        [1],
        [[]],
        {"a": 1},
    ),
]


def mutant(kind: Kind, number: int) -> tuple[bytes, bytes]:
    """The mutant with this number, and the intact file it came from."""
    chance = random.Random(number)
    seed = chance.choice(kind.seeds)
    mutate = chance.choice((_blind, _manifest, _manifest, _manifest, _member, _archive, _header, _spelling))
    return mutate(chance, kind, seed), seed


def _blind(chance: random.Random, kind: Kind, seed: bytes) -> bytes:
    data = bytearray(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        start, length = chance.randrange(len(data)), chance.choice((1, 2, 4, 8, 43, 200))
        match chance.randrange(7):
            case 0:
                data[start] ^= 1 << chance.randrange(8)
            case 1:
                data[start : start + length] = chance.randbytes(length)
            case 2:
                del data[start : start + length]
            case 3:
                data[start:start] = chance.randbytes(length)
            case 4:
                other = chance.choice(kind.seeds)
                at = chance.randrange(len(other))
                data[start : start + length] = other[at : at + length]
            case 5:
                del data[max(start, 1) :]
            case 6:
                data[start : start + 4] = struct.pack("<I", chance.choice(_NUMBERS[3:10]) % 2**32)
    return bytes(data)


def _zipped(kind: Kind, manifest: Any, members: dict[str, bytes], *, with_id: bool = True) -> bytes:
    manifest = kind.identified(manifest) if with_id and isinstance(manifest, dict) else manifest
    return zipped_entries([("manifest.json", spell(manifest)), *members.items()])


def _manifest(chance: random.Random, kind: Kind, seed: bytes) -> bytes:
    """Other content of the manifest, mostly with the id that belongs to it."""
    manifest, members = contents_of(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change_somewhere(chance, manifest)
    return _zipped(kind, manifest, members, with_id=chance.random() < 0.9)


def _change_somewhere(chance: random.Random, root: dict[str, Any]) -> None:
    node: Any = root
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chance.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.15:
            break
        node = node[key]
    value = node[key]
    match chance.randrange(8):
        case 0 if isinstance(node, dict):
            del node[key]
        case 1 if isinstance(node, dict):
            node[chance.choice(["extra", "", "sha256", key + "x"])] = copy.deepcopy(value)
        case 2 if isinstance(node, list):
            node.insert(key, copy.deepcopy(value))
        case 3:
            other = chance.choice(keys)
            node[key], node[other] = node[other], node[key]
        case 4 if type(value) in (int, float) and abs(value) < 2**62:
            node[key] = value + chance.choice((1, -1, 1e-12, 0.0))
        case 5 if isinstance(value, str):
            node[key] = chance.choice(
                (value.upper(), value[:-1], value + " ", "materialized", "paged", "flash", "muon")
            )
        case _:
            node[key] = copy.deepcopy(chance.choice(_VALUES))  # another change may go into it


def _member(chance: random.Random, kind: Kind, seed: bytes) -> bytes:
    """Other bytes of a member, with the hash, size and id that belong to them."""
    manifest, members = contents_of(seed)
    packed = [name for name in members if name.endswith("nf4")]
    name = chance.choice(packed or list(members)) if chance.random() < 0.5 else chance.choice(list(members))
    data = bytearray(members[name])
    start = 4 * chance.randrange(len(data) // 4)
    if name.endswith("nf4"):
        _change_packed(chance, data)
    else:
        match chance.randrange(4):
            case 0:
                data[start : start + 4] = chance.choice(
                    (float32(1.5), float32(float("nan")), b"\x00\x00\x80\xff")
                )
            case 1:
                data[start : start + 4] = chance.randbytes(4)
            case 2:
                del data[start:]
            case 3:
                data += chance.randbytes(chance.choice((1, 4)))
    members[name] = bytes(data)
    return _zipped(kind, kind.described(manifest, members), members)


def _change_packed(chance: random.Random, data: bytearray) -> None:
    match chance.randrange(5):
        case 0:  # a field of the first weight's header
            struct.pack_into("<Q", data, 16 + 8 * chance.randrange(10), chance.choice(_NUMBERS) % 2**64)
        case 1:
            struct.pack_into(
                "<I", data, 4 * chance.randrange(len(data) // 4), chance.choice(_NUMBERS) % 2**32
            )
        case 2:
            data[chance.randrange(len(data))] = chance.randrange(256)
        case 3:
            del data[chance.randrange(len(data)) :]
        case 4:
            data += chance.randbytes(chance.choice((1, 80)))


def _archive(chance: random.Random, kind: Kind, seed: bytes) -> bytes:
    """Entries exchanged, dropped, doubled or renamed, or other values in all headers."""
    manifest, members = contents_of(seed)
    entries = [("manifest.json", spell(manifest)), *members.items()]
    first, second = chance.randrange(len(entries)), chance.randrange(len(entries))
    info: dict[str, Any] = {}
    match chance.randrange(6):
        case 0:
            entries[first], entries[second] = entries[second], entries[first]
        case 1:
            del entries[first]
        case 2:
            entries.insert(first, entries[second])
        case 3:
            entries[first] = (
                chance.choice(("x", "../" + entries[first][0], entries[second][0])),
                entries[first][1],
            )
        case 4:
            entries[first] = (entries[first][0], entries[second][1])
        case 5:
            choices: list[dict[str, Any]] = [
                {"create_system": 3},
                {"external_attr": 1 << 16},
                {"comment": b"c"},
            ]
            info = chance.choice([*choices, {"compress_type": 8}, {"extra": b"\x01\x00\x00\x00"}])
    return zipped_entries(entries, **info)


def _header(chance: random.Random, kind: Kind, seed: bytes) -> bytes:
    """A field of a local header, of the directory or of the end record, forged."""
    data = bytearray(seed)
    signature = chance.choice((b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))
    starts = [at for at in range(len(data) - 22) if data.startswith(signature, at)] or [len(data) - 22]
    at = chance.choice(starts) + 2 * chance.randrange(22)
    width = chance.choice((2, 4))
    data[at : at + width] = (chance.choice([*_NUMBERS, len(seed)]) % 256**width).to_bytes(width, "little")
    return bytes(data)


def _spelling(chance: random.Random, kind: Kind, seed: bytes) -> bytes:
    """The same content, spelled otherwise, or text that is no JSON any more."""
    manifest, members = contents_of(seed)
    text = spell(manifest)
    at = chance.randrange(len(text))
    spelled = [
        json.dumps(manifest, indent=1).encode(),
        json.dumps(manifest, sort_keys=True).encode(),
        b"\xef\xbb\xbf" + text,
        text + b"\n",
        text.replace(b"{", b'{"format":1,', 1),
        text[:at] + chance.randbytes(1) + text[at + 1 :],
        text[:at] + chance.choice((b" ", b"\\u0061", b"0", b"e5", b"-", b"NaN", b"[" * 2000)) + text[at:],
        text[:at],
    ]
    return zipped_entries([("manifest.json", chance.choice(spelled)), *members.items()])
