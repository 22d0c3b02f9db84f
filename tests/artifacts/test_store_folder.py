"""Where a store lies, and what is accepted as one."""

import os
from pathlib import Path

import pytest

from artifacts import Store, StoreError


def test_a_store_is_made_in_a_new_folder_and_marked(tmp_path):
    store = Store.open(tmp_path / "new" / "store")
    assert (
        store.root / "STORE.json"
    ).read_bytes() == b'{"format":"riftco-store","hash":"sha256","version":1}'
    assert Store.open(str(store.root)).root == store.root


def test_an_existing_store_is_only_read_when_opened(tmp_path, monkeypatch):
    Store.open(tmp_path)

    def refuse(*arguments, **options):
        raise AssertionError("opening must not write")

    for call in ("mkdir", "link", "replace", "write", "unlink"):
        monkeypatch.setattr(os, call, refuse)
    Store.open(tmp_path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RIFTCO_STORE": "mine", "RIFTCO_HOME": "home"}, "mine"),
        ({"RIFTCO_HOME": "home"}, "home/store"),
        ({"RIFTCO_STORE": "", "RIFTCO_HOME": ""}, ".riftco/store"),
        ({}, ".riftco/store"),
    ],
)
def test_the_environment_says_where_the_store_is(tmp_path, monkeypatch, variables, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("RIFTCO_STORE", "RIFTCO_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = Store.open()
    assert store.root == tmp_path / expected
    assert store.root.is_absolute()


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"thesis\.txt") as caught:
        Store.open(tmp_path)
    assert caught.value.code == "not-a-store"
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        Store.open(path)
    with pytest.raises(StoreError, match="cannot be"):
        Store.open(path / "below")


@pytest.mark.parametrize(
    ("marker", "code"),
    [
        ("", "not-a-store"),
        ("[]", "not-a-store"),
        ('{"format":"zip"}', "not-a-store"),
        ('{"format":"riftco-store","hash":"sha256","version":2}', "newer-store"),
        ('{"format":"riftco-store","hash":"blake3","version":1}', "newer-store"),
    ],
)
def test_another_marker_is_refused(tmp_path, marker, code):
    (tmp_path / "STORE.json").write_text(marker)
    with pytest.raises(StoreError, match="store") as caught:
        Store.open(tmp_path)
    assert caught.value.code == code


def test_a_url_is_refused_instead_of_becoming_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="local"):
        Store.open("s3://bucket/store")
    assert os.listdir(tmp_path) == []


def test_a_file_url_names_an_absolute_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="three slashes") as caught:
        Store.open("file://folder/store")
    assert caught.value.code == "not-a-store"
    assert os.listdir(tmp_path) == []
    assert Store.open((tmp_path / "store").as_uri()).root == tmp_path / "store"


def test_a_store_whose_making_was_interrupted_is_finished(tmp_path):
    (tmp_path / "objects" / "sha256").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / ".staged.0123.tmp").write_text("left over")
    store = Store.open(tmp_path)
    assert store.read_bytes(store.put_bytes("text", b"x")) == b"x"


def test_the_home_folder_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/store").root == Path(tmp_path, "store")


def test_looking_makes_no_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIFTCO_STORE", "absent")
    with pytest.raises(StoreError, match=r"absent.*RIFTCO_STORE") as caught:
        Store.open(create=False)
    assert caught.value.code == "not-a-store"
    assert Store.preview().reference_names() == []
    assert os.listdir(tmp_path) == []
    (tmp_path / "absent").mkdir()
    with pytest.raises(StoreError, match="no store"):
        Store.open(create=False)
    assert Store.preview().digests() == []
    assert os.listdir(tmp_path / "absent") == []
    store = Store.open()
    store.put_bytes("text", b"x")
    assert Store.open(create=False).digests() == Store.preview().digests() == store.digests()


@pytest.mark.parametrize("look", [Store.preview, lambda root: Store.open(root, create=False)])
def test_looking_at_something_else_is_refused(tmp_path, look):
    (tmp_path / "thesis.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(StoreError) as caught:
            look(path)
        assert caught.value.code == "not-a-store"
    (tmp_path / "STORE.json").write_text('{"format":"riftco-store","hash":"sha256","version":2}')
    with pytest.raises(StoreError) as caught:
        look(tmp_path)
    assert caught.value.code == "newer-store"


def test_the_home_of_nobody_is_refused():
    with pytest.raises(StoreError, match="nobody-of-this-name") as caught:
        Store.open("~nobody-of-this-name/store")
    assert caught.value.code == "not-a-store"
