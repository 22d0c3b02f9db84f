"""GGUF, version 3, of float32 tensors under our own names (`general.architecture` is "riftco").

llama.cpp and its tools read the files and do not know the architecture. A reader that accepts exactly what
the writer writes needs no rule about order, padding or overlap: a file is parsed, turned into a bundle, and
written again.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from artifacts.arrays import FLOAT32
from artifacts.canonical_json import canonical_json, parse_json
from riftco.interchange.errors import InterchangeError, refused
from riftco.interchange.gguf_reader import GgufReader, Kind

MODEL_NAME = "Riftco Decoder"

_ALIGNMENT = 32
_F32 = 0
_DESCRIPTION = (
    "Riftco decoder-only Transformer with learned absolute positions, pre-LayerNorm blocks, causal "
    "self-attention, and GELU feed-forward layers."
)
_SIZES = {  # of `ModelConfig`
    "context_length": "maximum_context",
    "embedding_length": "model_width",
    "block_count": "block_count",
    "feed_forward_length": "feed_forward_width",
    "attention.head_count": "head_count",
}
_MERGE_PARTS = ("merge_left", "merge_right", "merge_result")

_Field = tuple[str, Kind, Any]


def chunks(bundle: ModelBundle, name: str = MODEL_NAME) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in pieces that share the weights' memory; `name` is for people."""
    fields, tensors = list(_fields(bundle, name)), bundle.tensors()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(_text(key) + _value(kind, value) for key, kind, value in fields)
    offset = 0
    for tensor_name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        head += _text(tensor_name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _F32, offset)
        offset += tensor.nbytes + _padding(tensor.nbytes)
    yield head + bytes(_padding(len(head)))
    for tensor in tensors.values():
        yield tensor.reshape(-1).view(np.uint8).data
        yield bytes(_padding(tensor.nbytes))


def load(path: Path) -> ModelBundle:
    """The model in a file; InterchangeError unless its bytes are those of `chunks` for it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: is no file")
    data = path.read_bytes()
    with refused(path):
        reader = GgufReader(data)
        _require_ours(reader)
        bundle = _bundle(reader)
        name, at = reader.fields.get("general.name"), 0
        if not isinstance(name, str):
            raise InterchangeError("fields", f"general.name must be a text, got {name!r}")
        for chunk in chunks(bundle, name):
            if data[at : at + len(chunk)] != chunk:
                raise InterchangeError("not-canonical", "its bytes are not those of an export of its content")
            at += len(chunk)
        if at != len(data):
            raise InterchangeError("not-canonical", f"{len(data) - at} bytes follow its end")
    return bundle


def _fields(bundle: ModelBundle, name: str) -> Iterator[_Field]:
    config, tokenizer = bundle.config, bundle.tokenizer
    yield "general.architecture", Kind.STRING, "riftco"
    yield "general.name", Kind.STRING, name
    yield "general.description", Kind.STRING, _DESCRIPTION
    yield "general.file_type", Kind.UINT32, 0
    yield "general.alignment", Kind.UINT32, _ALIGNMENT
    ours: list[_Field] = [
        ("architecture_id", Kind.STRING, "riftco_decoder_v1"),
        ("architecture_version", Kind.UINT32, 1),
        *((theirs, Kind.UINT64, getattr(config, size)) for theirs, size in _SIZES.items()),
        ("attention.layer_norm_epsilon", Kind.FLOAT32, config.layer_norm_epsilon),
        ("layer_norm_epsilon", Kind.FLOAT64, config.layer_norm_epsilon),
        ("vocabulary_size", Kind.UINT64, config.vocabulary_size),
        ("random_seed", Kind.UINT64, config.random_seed),
        ("activation", Kind.STRING, "gelu"),
        ("position_embedding", Kind.STRING, "learned_absolute"),
        ("normalization", Kind.STRING, "pre_layer_norm"),
        ("tensor_data_layout", Kind.STRING, "reference"),
        ("stage", Kind.STRING, bundle.stage),
        ("parent_artifact_present", Kind.BOOL, bundle.parent_artifact_id is not None),
        ("metadata_json", Kind.STRING, canonical_json(bundle.metadata).decode()),
        ("tokenizer.method", Kind.STRING, tokenizer.method),
    ]
    if bundle.parent_artifact_id is not None:
        ours.append(("parent_artifact_id", Kind.STRING, bundle.parent_artifact_id))
    ours += [(f"tokenizer.{part}", Kind.ARRAY, numbers) for part, numbers in _token_arrays(tokenizer)]
    for key, kind, value in ours:
        yield f"riftco.{key}", kind, value


def _token_arrays(tokenizer: TokenizerSpec) -> Iterator[tuple[str, Iterable[int]]]:
    if tokenizer.byte_vocabulary is not None:
        yield "byte_vocabulary", tokenizer.byte_vocabulary
        return
    for i, part in enumerate(_MERGE_PARTS):
        yield part, [rule[i] for rule in tokenizer.merge_rules or ()]


def _require_ours(reader: GgufReader) -> None:
    architecture = reader.fields.get("general.architecture")
    if architecture != "riftco":
        raise InterchangeError(
            "foreign", f"its architecture is {architecture!r}: only models exported by riftco can be imported"
        )
    for name, kind, _ in reader.tensors:
        if kind != _F32:
            raise InterchangeError(
                "dtype", f"{name}: unsupported tensor type {kind}; only F32 can be imported"
            )


def _bundle(reader: GgufReader) -> ModelBundle:
    """What the fields and tensors say; whether they lie as they must is found by writing them."""
    try:
        ours = {key.removeprefix("riftco."): value for key, value in reader.fields.items()}
        sizes = {size: ours[theirs] for theirs, size in _SIZES.items()}
        config = ModelConfig(
            **sizes,
            vocabulary_size=ours["vocabulary_size"],
            random_seed=ours["random_seed"],
            layer_norm_epsilon=ours["layer_norm_epsilon"],
        )
        if ours["tokenizer.method"] == "byte":
            tokenizer = TokenizerSpec("byte", tuple(ours["tokenizer.byte_vocabulary"]))
        else:
            rules = zip(*(ours[f"tokenizer.{part}"] for part in _MERGE_PARTS), strict=True)
            tokenizer = TokenizerSpec(ours["tokenizer.method"], merge_rules=tuple(rules))
        metadata = parse_json(ours["metadata_json"].encode(), what="metadata_json")
        stage, parent = ours["stage"], ours.get("parent_artifact_id")
    except KeyError as error:
        raise InterchangeError("fields", f"it lacks riftco.{error.args[0]}") from None
    except AttributeError:
        raise InterchangeError("fields", "riftco.metadata_json must be a text") from None
    if config.block_count > len(reader.tensors):  # before so many names are made
        raise InterchangeError("tensors", f"{len(reader.tensors)} tensors for {config.block_count} blocks")
    specs = config.parameter_specs()
    return ModelBundle(
        config,
        tokenizer,
        specs,
        _weights(reader, specs),
        stage=stage,
        parent_artifact_id=parent,
        metadata=metadata,
    )


def _weights(reader: GgufReader, specs: Any) -> NDArray[np.float32]:
    names = [name for name, _, _ in reader.tensors]
    if names != [spec.name for spec in specs]:
        raise InterchangeError("tensors", "its tensors are not those of its sizes, in their order")
    found, at = [], reader.end + _padding(reader.end)
    for spec in specs:
        size = FLOAT32.itemsize * spec.count
        if at + size > len(reader.data):
            raise InterchangeError(
                "truncated", f"{spec.name}: ends at byte {at + size} of {len(reader.data)}"
            )
        found.append(np.frombuffer(reader.data, FLOAT32, spec.count, at))
        at += size + _padding(size)
    return np.concatenate(found)


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: Kind, value: Any) -> bytes:
    head = struct.pack("<I", kind)
    if kind == Kind.STRING:
        return head + _text(value)
    if kind == Kind.ARRAY:
        numbers = np.array(value, "<u4")
        return head + struct.pack("<IQ", Kind.UINT32, len(numbers)) + numbers.tobytes()
    return head + struct.pack("<" + kind.format, value)
