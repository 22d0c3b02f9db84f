"""Models that go to other tools and come back: the front door, and the command."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from artifacts import BundleError, ModelBundle, ParameterSpec, Store
from riftco.cli import app
from riftco.interchange import InterchangeError, convert_model, export_model, load_model
from tests.artifacts.bundles import CONFIG, small_bundle
from tests.riftco.interchange.bundles import bundles
from tests.support import FIXTURES

FORMATS = ("rift", "huggingface", "gguf")


@pytest.mark.parametrize("name", ["byte", "bpe", "bpe-lora-child", "bpe-qlora-child", "edge"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_model_of_the_original_comes_back_with_its_id(name, format, tmp_path) -> None:
    bundle = ModelBundle.load(FIXTURES / f"{name}.rift")
    again = load_model(export_model(bundle, tmp_path / "there", format=format), format=format)
    assert again.to_bytes() == bundle.to_bytes()


@settings(max_examples=60, deadline=None)
@given(bundles())
def test_any_model_comes_back_with_its_id(tmp_path_factory, bundle) -> None:
    folder = tmp_path_factory.mktemp("models")
    for format in FORMATS:
        export_model(bundle, folder / format, format=format)
        assert load_model(folder / format, format=format).to_bytes() == bundle.to_bytes()


def test_all_formats_convert_into_each_other(tmp_path) -> None:
    last, known = FIXTURES / "edge.rift", "rift"
    for i, format in enumerate(["gguf", "huggingface", "gguf", "rift"]):
        path = tmp_path / f"{i}"
        convert_model(last, path, source_format=known, destination_format=format)
        last, known = path, format
    assert last.read_bytes() == (FIXTURES / "edge.rift").read_bytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("taken", ["file", "empty folder", "link to nowhere"])
def test_nothing_is_replaced(format, taken, tmp_path) -> None:
    path = tmp_path / "there"
    if taken == "file":
        path.write_text("mine")
    elif taken == "empty folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="there: exists and would be lost"):
        export_model(small_bundle(), path, format=format)
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_name_that_is_taken_meanwhile_is_not_replaced(format, tmp_path, monkeypatch) -> None:
    path = tmp_path / "there"
    monkeypatch.setattr("riftco.interchange.publishing._require_free", lambda path: path.mkdir())
    with pytest.raises(FileExistsError):
        export_model(small_bundle(), path, format=format)
    assert os.listdir(tmp_path) == ["there"]
    assert not os.listdir(path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_nothing(format, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("artifacts.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        export_model(small_bundle(), tmp_path / "there", format=format)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("format", ["huggingface", "gguf"])
@pytest.mark.parametrize(
    "parameters",
    [
        [ParameterSpec("token_embedding.weight", (62,))],
        [replace(spec, name=spec.name[::-1]) for spec in CONFIG.parameter_specs()],
    ],
)
def test_other_tensors_than_a_decoder_has_are_refused(format, parameters, tmp_path) -> None:
    with pytest.raises(InterchangeError, match="parameters are not those of its config"):
        export_model(small_bundle(parameters=parameters), tmp_path / "there", format=format)
    assert not os.listdir(tmp_path)


def test_what_could_not_be_imported_is_not_exported(tmp_path) -> None:
    nested: list = [0] * 100_000
    for _ in range(100):
        nested = [nested]
    with pytest.raises(InterchangeError, match="more than 16777216; nest it less"):
        export_model(small_bundle(metadata={"x": nested}), tmp_path / "there", format="huggingface")
    config = replace(CONFIG, block_count=257, model_width=1)
    specs = config.parameter_specs()
    weights = np.zeros(sum(spec.count for spec in specs))
    with pytest.raises(InterchangeError, match="block_count must be between 1 and 256, got 257"):
        export_model(
            small_bundle(config=config, parameters=specs, weights=weights),
            tmp_path / "there",
            format="huggingface",
        )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_there_is_named(format, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_model(tmp_path / "nothing", format=format)


@pytest.mark.parametrize("format", ["huggingface", "gguf"])
def test_a_pipe_is_no_model(format, tmp_path) -> None:
    path = tmp_path / "there"
    if format == "huggingface":
        path.mkdir()
    os.mkfifo(path / "config.json" if format == "huggingface" else path)
    with pytest.raises(FileNotFoundError, match="is no file"):
        load_model(path, format=format)


def test_formats_are_not_guessed() -> None:
    with pytest.raises(InterchangeError, match=r"byte\.rift: it does not begin as GGUF"):
        load_model(FIXTURES / "byte.rift", format="gguf")
    with pytest.raises(BundleError):
        load_model(FIXTURES / "edge.gguf", format="rift")
    with pytest.raises(ValueError, match="one of rift, huggingface, gguf, got 'onnx'"):
        load_model(FIXTURES / "byte.rift", format="onnx")


def riftco(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_takes_a_model_there_and_back(tmp_path) -> None:
    said = riftco(
        "convert", FIXTURES / "byte.rift", tmp_path / "hub", "--from", "rift", "--to", "huggingface"
    )
    artifact_id = ModelBundle.identify(FIXTURES / "byte.rift")
    assert said == f"{tmp_path}/hub: huggingface, pretraining, artifact {artifact_id}\n"
    again = tmp_path / "again.rift"
    riftco("convert", tmp_path / "hub", again, "--from", "huggingface", "--to", "rift")
    assert again.read_bytes() == (FIXTURES / "byte.rift").read_bytes()


def test_the_command_takes_a_model_of_the_store(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "store"))
    ref = Store.open(durability="none").put_bundle(small_bundle())
    named = ("--gguf-model-name", "Ours")
    riftco("convert", ref.digest, tmp_path / "m.gguf", "--from", "rift", "--to", "gguf", *named)
    assert load_model(tmp_path / "m.gguf", format="gguf") == small_bundle()
    assert b"Ours" in (tmp_path / "m.gguf").read_bytes()


def test_the_command_says_what_is_wrong_in_a_line(tmp_path) -> None:
    path: Path = tmp_path / "there"
    path.write_text("mine")
    there = ("--from", "rift", "--to", "gguf")
    assert riftco("convert", FIXTURES / "byte.rift", path, *there, code=2).count("\n") == 1
    assert "is no file" in riftco(
        "convert", tmp_path, tmp_path / "x", "--from", "gguf", "--to", "rift", code=2
    )
