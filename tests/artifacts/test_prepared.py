"""Prepared datasets: the original's folders are accepted, and each rule refuses what breaks it."""

import hashlib
import json
import os
import shutil

import pytest

from artifacts import DatasetError, PreparedDataset, verify_prepared_dataset
from tests.support import FIXTURES

NAMES = ("dolly", "tinystories")


@pytest.fixture
def dolly(tmp_path):
    return shutil.copytree(FIXTURES / "prepared-dolly", tmp_path / "dolly")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_bytes())


def write_manifest(folder, manifest):
    text = json.dumps(manifest, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def refusal(folder) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        verify_prepared_dataset(folder)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_the_original_is_accepted(name):
    folder = FIXTURES / f"prepared-{name}"
    dataset = verify_prepared_dataset(str(folder))
    assert dataset.directory == folder
    assert dataset.manifest == manifest_of(folder)
    assert dataset.manifest_path == folder / "manifest.json"
    assert dataset.manifest_sha256 == hashlib.sha256(dataset.manifest_path.read_bytes()).hexdigest()
    assert list(dataset.files) == ["train", "validation", "test"]
    for partition in dataset.files:
        file = dataset.file(partition)
        assert file.read_verified_bytes() == file.path.read_bytes()
        assert file.records == dataset.manifest["counts"][partition]
        assert file.path.stem == partition


def test_an_unknown_partition_is_named():
    with pytest.raises(DatasetError, match="train, validation, test, but no 'dev'") as caught:
        verify_prepared_dataset(FIXTURES / "prepared-dolly").file("dev")
    assert caught.value.code == "partition"


def test_the_manifest_is_a_fresh_copy(dolly):
    dataset = verify_prepared_dataset(dolly)
    dataset.manifest["counts"]["train"] = 0
    assert dataset.manifest["counts"]["train"] == 35
    assert isinstance(dataset, PreparedDataset)


def test_a_file_that_changes_later_is_noticed_when_it_is_read(dolly):
    file = verify_prepared_dataset(dolly).file("test")
    data = file.path.read_bytes()
    file.path.write_bytes(data.replace(b"e", b"a", 1))
    with pytest.raises(DatasetError, match="prepare the dataset again") as caught:
        file.read_verified_bytes()
    assert caught.value.code == "file"
    file.path.unlink()
    with pytest.raises(DatasetError) as caught:
        file.read_verified_bytes()
    assert caught.value.code == "missing"


def test_what_is_not_there_is_refused(dolly, tmp_path):
    assert refusal(tmp_path / "absent").code == "missing"
    assert refusal(dolly / "manifest.json").code == "missing"
    (dolly / "train.jsonl").unlink()
    assert refusal(dolly).code == "missing"
    os.mkfifo(dolly / "train.jsonl")
    assert refusal(dolly).code == "missing"
    (dolly / "manifest.json").unlink()
    assert refusal(dolly).code == "missing"


@pytest.mark.parametrize("partition", ["train", "validation", "test"])
@pytest.mark.parametrize(
    "change", [lambda data: data + b"\n", lambda data: data[:-1], lambda data: data[::-1]]
)
def test_changed_bytes_are_refused(dolly, partition, change):
    path = dolly / f"{partition}.jsonl"
    path.write_bytes(change(path.read_bytes()))
    assert refusal(dolly).code in ("file", "json")


SPELLINGS = [
    lambda text: text.removesuffix("\n"),
    lambda text: text + "\n",
    lambda text: json.dumps(json.loads(text), sort_keys=True, indent=1, ensure_ascii=False) + "\n",
    lambda text: json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False) + "\n",
    lambda text: json.dumps(dict(reversed(json.loads(text).items())), indent=2, ensure_ascii=False) + "\n",
    lambda text: text.replace('"dolly"', '"d\\u006flly"'),
    lambda text: text.replace("\n", "\r\n"),
    lambda text: text.replace("0.25", "0.250"),
]


@pytest.mark.parametrize("respell", SPELLINGS)
def test_a_manifest_that_is_spelled_otherwise_is_refused(dolly, respell):
    path = dolly / "manifest.json"
    path.write_bytes(respell(path.read_text()).encode())
    assert refusal(dolly).code == "not-canonical"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{", b"\xef\xbb\xbf{"),
        (b"{", b""),
        (b'"adapter"', b'"adapter": "x", "adapter"'),
        (b"0.25", b"NaN"),
        (b"0.25", b"1e999"),
        (b'"dolly"', b'"\\ud800"'),
        (b'"dolly"', b"\xff"),
        (b"0.25", b"[" * 50_000 + b"]" * 50_000),
    ],
)
def test_a_manifest_that_is_no_strict_json_is_refused(dolly, old, new):
    path = dolly / "manifest.json"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert refusal(dolly).code == "json"


ABSENT = object()
CONTENTS = [
    ("format", "riftco-transformer.prepared-dataset.v2", "format"),
    ("format", ABSENT, "format"),
    *((f"source.{key}", " ", "source") for key in ("dataset", "config", "split", "license")),
    *((f"source.{key}", 5, "source") for key in ("dataset_url", "rows_api_url")),
    ("source.license", ABSENT, "manifest"),
    ("source", [], "manifest"),
    ("partitioning.identity_fields", [], "identity"),
    ("partitioning.identity_fields", "prompt", "identity"),
    ("partitioning.identity_fields", ["prompt", "prompt"], "identity"),
    ("partitioning.identity_fields", ["prompt", ""], "identity"),
    ("partitioning.identity_fields", ["prompt", 1], "identity"),
    ("serialization.file_extension", "jsonl", "extension"),
    ("serialization.file_extension", ".", "extension"),
    ("serialization.file_extension", "./../x", "extension"),
    ("serialization.file_extension", ".a/b", "extension"),
    ("serialization.file_extension", ".a\\b", "extension"),
    ("serialization.file_extension", ".a\0", "extension"),
    ("serialization.file_extension", 1, "extension"),
    ("serialization.file_extension", "." + "a" * 5000, "files"),
    ("serialization.media_type", "text/plain", "files"),
    ("counts.source_rows", 63, "counts"),
    ("counts.adapted_records", 61, "counts"),
    ("counts.duplicates_removed", 3, "counts"),
    ("counts.train", 36, "counts"),
    ("counts.train", -1, "manifest"),
    ("counts.train", True, "manifest"),
    ("counts.test", 13.0, "manifest"),
    ("counts.test", ABSENT, "manifest"),
    ("deduplication.duplicates_removed", 5, "counts"),
    ("deduplication.duplicates_removed", ABSENT, "manifest"),
    ("source.selection.row_ranges", {}, "manifest"),
    ("source.selection.row_ranges", [1], "manifest"),
    ("source.selection.row_ranges", [], "ranges"),
    ("source.selection.row_ranges", [{"offset": 0, "length": 63}], "ranges"),
    ("source.selection.row_ranges", [{"offset": 0, "length": 0}, {"offset": 0, "length": 64}], "manifest"),
    ("source.selection.row_ranges", [{"offset": -1, "length": 64}], "manifest"),
    ("source.selection.row_ranges", [{"offset": 0, "length": 64.0}], "manifest"),
    ("source.selection.row_ranges", [{"offset": 0, "length": 33}, {"offset": 32, "length": 31}], "ranges"),
    ("source.selection.row_ranges", [{"offset": 32, "length": 32}, {"offset": 0, "length": 32}], "ranges"),
    ("source.selection.row_ranges", [{"offset": 0, "length": 10**4200}], "ranges"),
    ("files.train", ABSENT, "files"),
    ("files.extra", {}, "files"),
    ("files", [], "manifest"),
    ("files.train", [], "manifest"),
    ("files.train.path", "../dolly/train.jsonl", "files"),
    ("files.train.path", "test.jsonl", "files"),
    ("files.train.media_type", "text/plain", "files"),
    ("files.train.records", 36, "files"),
    ("files.train.records", 35.0, "files"),
    ("files.train.bytes", 3534, "file"),
    ("files.train.bytes", -1, "manifest"),
    ("files.train.bytes", "3533", "manifest"),
    ("files.train.sha256", "0" * 64, "file"),
    ("files.train.sha256", "0" * 63, "files"),
    ("files.train.sha256", ABSENT, "manifest"),
]


@pytest.mark.parametrize(("path", "value", "code"), CONTENTS)
def test_a_manifest_that_breaks_a_rule_is_refused(dolly, path, value, code):
    manifest = manifest_of(dolly)
    *parents, key = path.split(".")
    target = manifest
    for parent in parents:
        target = target[parent]
    target[key] = value
    if value is ABSENT:
        del target[key]
    write_manifest(dolly, manifest)
    error = refusal(dolly)
    assert error.code == code, str(error)
    assert "manifest.json" in str(error) or code == "file"


def test_a_manifest_that_is_no_object_is_refused(dolly):
    write_manifest(dolly, [])
    assert refusal(dolly).code == "format"


LINES = [
    (b"\n", "json"),
    (b" \n", "json"),
    (b"[]\n", "records"),
    (b'{"":"x"}\n', "records"),
    (b'{"prompt":1}\n', "records"),
    (b'{"prompt":null}\n', "records"),
    (b'{"prompt":"a","prompt":"b"}\n', "json"),
    (b'{"prompt":NaN}\n', "json"),
    (b'{"prompt":"\xff"}\n', "json"),
    (b'{"prompt":"a"}{}\n', "json"),
    (b'{"prompt":"a"}\n{"prompt":"b"}\n', "records"),
    (b"", "records"),
]


def with_first_line(folder, line):
    """Replace the first test record and let the manifest hold the hash and size of the new file."""
    path = folder / "test.jsonl"
    path.write_bytes(line + path.read_bytes().split(b"\n", 1)[1])
    manifest = manifest_of(folder)
    manifest["files"]["test"]["bytes"] = len(path.read_bytes())
    manifest["files"]["test"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_manifest(folder, manifest)


@pytest.mark.parametrize(("line", "code"), LINES)
def test_records_that_break_a_rule_are_refused_even_with_their_own_hash(dolly, line, code):
    with_first_line(dolly, line)
    error = refusal(dolly)
    assert error.code == code, str(error)
    assert "test.jsonl" in str(error)


def test_a_record_is_text_by_name_whatever_the_names(dolly):
    with_first_line(dolly, '{"ключ":"","x":"\\u2028"}\r\n'.encode())
    assert verify_prepared_dataset(dolly).file("test").records == 13


def test_an_unreadable_file_is_refused_as_missing(dolly, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert refusal(dolly).code == "missing"
