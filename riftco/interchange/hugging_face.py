"""Models as directories in the style of Hugging Face's hub: config, weights, tokenizer.

The architecture is our own, `riftco_decoder_v1`: transformers reads the files and does not know the class.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import ModelBundle, ModelConfig, TokenizerSpec
from artifacts.arrays import Floats
from artifacts.canonical_json import parse_json
from artifacts.checks import require_integer
from artifacts.files import Chunks
from riftco.interchange import safetensors
from riftco.interchange.errors import InterchangeError, UnsupportedHuggingFaceModelError, refused
from riftco.interchange.publishing import publish_folder

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_MAXIMUM_JSON = 16 << 20  # bytes
_MAXIMUM_BLOCKS = 256

_ARCHITECTURE = "riftco_decoder_v1"
_CONSTANTS: dict[str, Any] = {
    "architectures": ["RiftcoDecoderForCausalLM"],
    "attention_projection": "separate_qkv",
    "dtype": "float32",
    "hidden_act": "gelu",
    "model_type": "riftco_decoder",
    "normalization_type": "layer_norm_with_bias",
    "position_embedding_type": "learned_absolute",
    "riftco_architecture": _ARCHITECTURE,
    "riftco_interchange_version": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_bias": True,
}
_SIZES = {  # of `ModelConfig`
    "vocabulary_size": "vocab_size",
    "maximum_context": "max_position_embeddings",
    "model_width": "hidden_size",
    "head_count": "num_attention_heads",
    "block_count": "num_hidden_layers",
    "feed_forward_width": "intermediate_size",
    "random_seed": "initializer_seed",
}
_TOKENIZER_CLASSES = {"byte": "RiftcoByteTokenizer", "bpe": "RiftcoByteLevelBPETokenizer"}
_TOKENIZER_HEAD = {"format": "riftco-tokenizer", "format_version": 1}
_NAMES = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "final_norm.scale": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "language_model_head.weight": "lm_head.weight",
    "language_model_head.bias": "lm_head.bias",
}
_BLOCK_NAMES = {
    "attention_norm": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.output": "attn.out_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.fc_in",
    "feed_forward.project": "mlp.fc_out",
}


def export(bundle: ModelBundle, path: Path) -> Path:
    """Write the directory, which must not exist; InterchangeError for what `load` would refuse."""
    config, tokenizer = bundle.config, bundle.tokenizer
    with refused(path):
        require_integer("block_count", config.block_count, 1, _MAXIMUM_BLOCKS)
    artifact = {
        "metadata": bundle.metadata,
        "parent_artifact_id": bundle.parent_artifact_id,
        "source_artifact_id": bundle.artifact_id,
        "stage": bundle.stage,
    }
    sizes = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    sizes |= {"layer_norm_eps": config.layer_norm_epsilon, "riftco_artifact": artifact}
    tensors = {_external(name): tensor for name, tensor in bundle.tensors().items()}
    files: dict[str, Chunks] = {
        _CONFIG: _json(_CONSTANTS | sizes),
        _WEIGHTS: safetensors.encode(tensors, _weights_metadata(bundle.artifact_id)),
        _TOKENIZER: _json(_TOKENIZER_HEAD | tokenizer.to_json()),
        _TOKENIZER_CONFIG: _json(_tokenizer_config(tokenizer, config)),
    }
    return publish_folder(path, files)


def load(path: Path) -> ModelBundle:
    """The model in a directory; InterchangeError if it is none of ours, FileNotFoundError without files."""
    config = _read_json(path / _CONFIG)
    with refused(path / _CONFIG):
        _require_ours(config)
        sizes = _model_config(config)
        artifact = _artifact(config.get("riftco_artifact", {}))
    tokenizer = _tokenizer(path, sizes)
    source = artifact.pop("source_artifact_id", None)
    weights = _read(path / _WEIGHTS)
    with refused(path / _WEIGHTS):
        tensors, metadata = safetensors.decode(weights)
        if metadata and metadata != _weights_metadata(source):
            raise InterchangeError("metadata", f"its metadata {metadata} contradicts {_CONFIG}")
        flat = _in_our_order(tensors, sizes)
    with refused(path):
        bundle = ModelBundle(sizes, tokenizer, sizes.parameter_specs(), flat, **artifact)
        if source is not None and bundle.artifact_id != source:
            raise InterchangeError("id", f"its content is {bundle.artifact_id}, {_CONFIG} says {source}")
    return bundle


def _external(name: str) -> str:
    """A parameter's name in the directory."""
    if name in _NAMES:
        return _NAMES[name]
    _, block, rest = name.split(".", 2)
    module, leaf = rest.rsplit(".", 1)
    return f"transformer.h.{block}.{_BLOCK_NAMES[module]}.{'weight' if leaf == 'scale' else leaf}"


def _in_our_order(tensors: Mapping[str, Floats], config: ModelConfig) -> Floats:
    specs = {_external(spec.name): spec for spec in config.parameter_specs()}
    if tensors.keys() != specs.keys():
        missing, unexpected = sorted(specs.keys() - tensors.keys()), sorted(tensors.keys() - specs.keys())
        raise InterchangeError("names", f"missing tensors {missing}, unexpected ones {unexpected}")
    for name, spec in specs.items():
        if tensors[name].shape != spec.shape:
            raise InterchangeError(
                "shape", f"{name} is {tensors[name].shape}, {_CONFIG} asks for {spec.shape}"
            )
    return np.concatenate([tensors[name].ravel() for name in specs])


def _weights_metadata(source: str | None) -> dict[str, str]:
    constants = {"architecture": _ARCHITECTURE, "format": "riftco-huggingface-weights", "format_version": "1"}
    return constants | ({} if source is None else {"source_artifact_id": source})


def _tokenizer_config(tokenizer: TokenizerSpec, config: ModelConfig) -> dict[str, Any]:
    return {
        "model_max_length": config.maximum_context,
        "riftco_tokenizer_format": "riftco_tokenizer_v1",
        "tokenizer_class": _TOKENIZER_CLASSES[tokenizer.method],
        "tokenizer_file": _TOKENIZER,
    }


def _require_ours(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != _CONSTANTS["model_type"]:
        raise UnsupportedHuggingFaceModelError(
            "foreign",
            f"its model_type is {model_type!r}: only {_CONSTANTS['model_type']!r} can be imported, whose "
            "layers are ours; a model of another architecture would compute something else",
        )
    for key, value in _CONSTANTS.items():
        if key not in config or type(config[key]) is not type(value) or config[key] != value:
            raise InterchangeError("config", f"{key} must be {value!r}, got {config.get(key)!r}")


def _model_config(config: Mapping[str, Any]) -> ModelConfig:
    missing = [key for key in (*_SIZES.values(), "layer_norm_eps") if key not in config]
    if missing:
        raise InterchangeError("config", f"it lacks {', '.join(missing)}")
    require_integer("num_hidden_layers", config["num_hidden_layers"], 1, _MAXIMUM_BLOCKS)
    sizes = {ours: config[theirs] for ours, theirs in _SIZES.items()}
    return ModelConfig(**sizes, layer_norm_epsilon=config["layer_norm_eps"])


def _artifact(value: Any) -> dict[str, Any]:
    """What a bundle says beside its weights; a directory from elsewhere need not say it."""
    defaults = {
        "metadata": {"interchange_source": "huggingface_directory"},
        "parent_artifact_id": None,
        "source_artifact_id": None,
        "stage": "huggingface_import",
    }
    if not isinstance(value, dict) or not value.keys() <= defaults.keys():
        raise TypeError(f"riftco_artifact must be an object of {sorted(defaults)} alone, got {value!r}")
    return defaults | value


def _tokenizer(path: Path, config: ModelConfig) -> TokenizerSpec:
    value = _read_json(path / _TOKENIZER)
    with refused(path / _TOKENIZER):
        for key, expected in _TOKENIZER_HEAD.items():
            found = value.pop(key, None)
            if type(found) is not type(expected) or found != expected:
                raise InterchangeError("tokenizer", f"{key} must be {expected!r}, got {found!r}")
        tokenizer = TokenizerSpec.from_json(value)
    described = _read_json(path / _TOKENIZER_CONFIG)
    with refused(path / _TOKENIZER_CONFIG):
        expected_config = _tokenizer_config(tokenizer, config)
        for key, expected in expected_config.items():
            found = described.get(key)
            if type(found) is not type(expected) or found != expected:
                raise InterchangeError("tokenizer", f"{key} must be {expected!r}, got {found!r}")
    return tokenizer


def _json(value: Any) -> bytes:
    with refused("metadata"):
        text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if len(data := text.encode()) > _MAXIMUM_JSON:
        raise InterchangeError("size", f"JSON of {len(data)} bytes, more than {_MAXIMUM_JSON}; nest it less")
    return data


def _read_json(path: Path) -> dict[str, Any]:
    data = _read(path, _MAXIMUM_JSON)
    with refused(path):
        value = parse_json(data, what="it")
        if not isinstance(value, dict):
            raise TypeError(f"must be a JSON object, got {type(value).__name__}")
    return value


def _read(path: Path, most: int | None = None) -> bytes:
    if not path.is_file():  # a pipe or device would have no end
        raise FileNotFoundError(f"{path}: is no file")
    if most is not None and path.stat().st_size > most:
        raise InterchangeError("size", f"{path}: has more than {most} bytes")
    return path.read_bytes()
