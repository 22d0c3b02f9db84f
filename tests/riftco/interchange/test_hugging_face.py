"""Directories in Hugging Face's style: the original's bytes, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from artifacts import ModelBundle
from riftco.interchange import (
    InterchangeError,
    UnsupportedHuggingFaceModelError,
    export_model,
    load_model,
)
from tests.support import FIXTURES

DIRECTORY = FIXTURES / "byte-huggingface"
BUNDLE = ModelBundle.load(FIXTURES / "byte.rift")
REMOVED = object()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the original's directory, to be damaged."""
    return Path(shutil.copytree(DIRECTORY, tmp_path / "hub"))


def load(directory: Path) -> ModelBundle:
    return load_model(directory, format="huggingface")


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change(path: Path, key: str, value: Any) -> None:
    edit(path, lambda content: content.pop(key) if value is REMOVED else content.update({key: value}))


def test_the_original_would_have_written_the_same_bytes(tmp_path) -> None:
    path = export_model(BUNDLE, tmp_path / "hub", format="huggingface")
    names = sorted(file.name for file in path.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (path / name).read_bytes() == (DIRECTORY / name).read_bytes()


def test_the_directory_of_the_original_is_its_bundle() -> None:
    assert load(DIRECTORY).to_bytes() == BUNDLE.to_bytes()


def test_weights_that_another_library_wrote_are_read(directory) -> None:
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path)
    assert load(directory) == BUNDLE


def test_a_directory_that_says_nothing_of_its_origin_is_an_import(directory) -> None:
    change(directory / "config.json", "riftco_artifact", REMOVED)
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path)
    bundle = load(directory)
    assert bundle.stage == "huggingface_import"
    assert bundle.parent_artifact_id is None
    assert bundle.metadata == {"interchange_source": "huggingface_directory"}
    assert np.array_equal(bundle.weights, BUNDLE.weights)


def test_what_other_tools_add_to_the_config_is_passed_over(directory) -> None:
    change(directory / "config.json", "transformers_version", "5.0.0")
    change(directory / "tokenizer_config.json", "padding_side", "left")
    assert load(directory) == BUNDLE


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2", None, REMOVED, ["riftco_decoder"]])
def test_other_architectures_are_not_computed_as_ours(directory, model_type) -> None:
    change(directory / "config.json", "model_type", model_type)
    with pytest.raises(UnsupportedHuggingFaceModelError, match=r"config\.json: its model_type is .* only"):
        load(directory)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["GPT2LMHeadModel"], "architectures must be"),
        ("attention_projection", "fused_qkv", "attention_projection must be"),
        ("dtype", "float16", "dtype must be"),
        ("hidden_act", "gelu_new", "hidden_act must be"),
        ("normalization_type", "rms_norm", "normalization_type must be"),
        ("position_embedding_type", "rotary", "position_embedding_type must be"),
        ("riftco_architecture", "riftco_decoder_v2", "riftco_architecture must be"),
        ("riftco_interchange_version", True, "riftco_interchange_version must be 1, got True"),
        ("riftco_interchange_version", 1.0, "riftco_interchange_version must be 1, got 1.0"),
        ("tie_word_embeddings", 0, "tie_word_embeddings must be False, got 0"),
        ("torch_dtype", "bfloat16", "torch_dtype must be"),
        ("use_bias", 1, "use_bias must be True, got 1"),
        ("use_bias", REMOVED, "use_bias must be True, got None"),
        ("vocab_size", 29.0, "must be an integer, got 29.0"),
        ("vocab_size", 30, "vocabulary_size is 30, but the tokenizer has 29|wte.weight is"),
        ("vocab_size", REMOVED, "lacks vocab_size"),
        ("layer_norm_eps", REMOVED, "lacks layer_norm_eps"),
        ("layer_norm_eps", 0, "layer_norm_epsilon must be a positive"),
        ("layer_norm_eps", "1e-5", "layer_norm_epsilon must be a number"),
        ("num_attention_heads", True, "must be an integer, got True"),
        ("num_attention_heads", 3, "not a multiple of head_count"),
        ("num_attention_heads", 2, "its content is .* says"),
        ("num_hidden_layers", 257, "between 1 and 256, got 257"),
        ("num_hidden_layers", 3, "missing tensors .*transformer.h.2"),
        ("num_hidden_layers", 1, "unexpected ones .*transformer.h.1"),
        ("intermediate_size", 25, r"fc_in.weight is \(24, 16\), .*asks for \(25, 16\)"),
        ("initializer_seed", -1, "random_seed must be between"),
        ("max_position_embeddings", 13, "model_max_length must be 13, got 12"),
        ("riftco_artifact", [], "must be an object of"),
        ("riftco_artifact", {"more": 1}, "must be an object of"),
        ("riftco_artifact", {"source_artifact_id": "0" * 64}, "contradicts config.json"),
        ("riftco_artifact", {"stage": 5}, "contradicts config.json|stage must be a text"),
    ],
)
def test_a_config_that_means_something_else_is_refused(directory, key, value, message) -> None:
    change(directory / "config.json", key, value)
    with pytest.raises(InterchangeError, match=message):
        load(directory)


def test_a_source_id_that_the_content_does_not_have_is_refused(directory) -> None:
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path)
    edit(directory / "config.json", lambda value: value["riftco_artifact"].update(stage="tuned"))
    with pytest.raises(InterchangeError, match=r"hub: its content is .* config\.json says"):
        load(directory)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("tokenizer.json", "format", "other", "format must be 'riftco-tokenizer'"),
        ("tokenizer.json", "format_version", True, "format_version must be 1, got True"),
        ("tokenizer.json", "method", "bpe", "must have exactly the keys"),
        ("tokenizer.json", "byte_vocabulary", [1, 1], "lists a byte twice"),
        ("tokenizer.json", "more", 1, "must have exactly the keys"),
        ("tokenizer_config.json", "model_max_length", 13, "model_max_length must be 12, got 13"),
        (
            "tokenizer_config.json",
            "tokenizer_class",
            "RiftcoByteLevelBPETokenizer",
            "tokenizer_class must be",
        ),
        ("tokenizer_config.json", "tokenizer_file", "../tokenizer.json", "tokenizer_file must be"),
        ("tokenizer_config.json", "riftco_tokenizer_format", REMOVED, "riftco_tokenizer_format must be"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(directory, file, key, value, message) -> None:
    change(directory / file, key, value)
    with pytest.raises(InterchangeError, match=message):
        load(directory)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 1}', '{"a": NaN}', "\ufeff{}", "[" * 100_000])
def test_what_is_no_object_of_strict_json_is_refused(directory, file, text) -> None:
    (directory / file).write_text(text)
    with pytest.raises(InterchangeError, match=rf"{file}: "):
        load(directory)


def test_a_json_file_without_end_is_not_read(directory) -> None:
    with (directory / "tokenizer.json").open("r+b") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: has more than 16777216 bytes"):
        load(directory)


@pytest.mark.parametrize("file", sorted(path.name for path in DIRECTORY.iterdir()))
def test_every_file_is_needed(directory, file) -> None:
    (directory / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        load(directory)


def test_every_parameter_of_a_directory_has_its_name_and_shape(directory) -> None:
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    ours = BUNDLE.tensors()
    assert np.array_equal(
        tensors["transformer.h.1.attn.out_proj.weight"], ours["blocks.1.attention.output.weight"]
    )
    assert np.array_equal(tensors["transformer.h.0.ln_2.weight"], ours["blocks.0.feed_forward_norm.scale"])
    assert np.array_equal(tensors["lm_head.bias"], ours["language_model_head.bias"])
    assert len(tensors) == len(ours)
