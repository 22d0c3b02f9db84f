"""Text files of every unpleasant kind, and documents between blank lines."""

import errno
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riftco.data import load_instructions, read_corpus, read_text, split_documents
from riftco.data.text import document_cut, share_warning
from riftco.errors import InputError
from tests.support import FIXTURES


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_newlines_of_every_system_become_one(tmp_path: Path) -> None:
    assert read_text(written(tmp_path / "a.txt", b"one\r\ntwo\rthree\n\r\nfour")) == "one\ntwo\nthree\n\nfour"


@given(st.text(alphabet="ab\r\n", min_size=1).map(lambda text: "x" + text))
def test_reading_equals_python_text_mode(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = written(tmp_path_factory.mktemp("mode") / "a.txt", text.encode())
    assert read_text(path) == path.read_text(encoding="utf-8")


def test_a_byte_order_mark_is_dropped_at_the_start_and_kept_inside(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"\xef\xbb\xbfone \xef\xbb\xbftwo")
    assert read_text(path) == "one \ufefftwo"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_a_byte_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, newline: bytes) -> None:
    path = written(tmp_path / "a.txt", newline.join([b"one", b"two", b"th\xffree", b"four"]))
    with pytest.raises(InputError, match=r"a\.txt:3: not UTF-8 \(byte 0xff\); save the file as UTF-8"):
        read_text(path)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("words".encode("utf-16"), "UTF-16"),
        ("words".encode("utf-16-le"), "UTF-16"),
        ("words\n\nand words, — and words".encode("utf-16-be"), "UTF-16"),
        (gzip.compress(b"words", mtime=0), "gzip"),
        (b"PK\x03\x04\x14\x00\xff", "a zip archive"),
        (b"PK\x03\x04stored words", "a zip archive"),
        (b"PAR1\x15\x04\xff", "Parquet"),
    ],
)
def test_what_is_no_text_is_named_as_what_it_is(tmp_path: Path, data: bytes, kind: str) -> None:
    with pytest.raises(
        InputError, match=rf"a\.txt:1: not UTF-8 \(looks like {kind}\); save the file as UTF-8"
    ):
        read_text(written(tmp_path / "a.txt", data))


def test_a_nul_in_a_text_is_text(tmp_path: Path) -> None:
    assert read_text(written(tmp_path / "a.txt", b"PAR1 is\0one\0")) == "PAR1 is\0one\0"


def test_an_encoded_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="byte 0xed"):
        read_text(written(tmp_path / "a.txt", b"\xed\xa0\x80"))


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b" \n\t\r\n"])
def test_an_empty_or_blank_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match=r"a\.txt: holds no text"):
        read_text(written(tmp_path / "a.txt", data))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: no such file"):
        read_text(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a folder"):
        read_text(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_text(f"{tmp_path}/nul\0")


def test_a_name_that_is_not_text_still_gives_a_printable_message() -> None:
    with pytest.raises(InputError) as caught:
        read_text("no\udcffwhere")
    assert r"no\udcffwhere: no such file" in str(caught.value).encode("utf-8").decode()


def test_one_file_is_a_corpus(tmp_path: Path) -> None:
    assert read_corpus(written(tmp_path / "any.name", b"one\n")) == "one\n"


def test_a_folder_is_read_in_path_order_with_subfolders_and_unusual_names(tmp_path: Path) -> None:
    for name in ("b/z.txt", "a b[1].TXT", "c.txt", "b/ä ö.txt", "B.txt"):
        written(tmp_path / name, f"{name}\n\n".encode())
    for name in ("notes.md", ".hidden.txt", ".git/x.txt"):
        written(tmp_path / name, b"not this")
    (tmp_path / "folder.txt").mkdir()
    assert split_documents(read_corpus(tmp_path)) == ("B.txt", "a b[1].TXT", "b/z.txt", "b/ä ö.txt", "c.txt")


def test_no_document_spans_two_files_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path / "1.txt", b"no newline at its end")
    written(tmp_path / "2.txt", b"\nsecond")
    assert read_corpus(tmp_path) == "no newline at its end\n\nsecond"


@pytest.mark.parametrize(
    ("name", "reader", "file"),
    [("tinystories", read_corpus, "train.txt"), ("dolly", load_instructions, "train.jsonl")],
)
def test_a_prepared_dataset_is_no_corpus_and_its_training_file_is_named(
    name: str, reader: Callable, file: str
) -> None:
    folder = FIXTURES / f"prepared-{name}"
    with pytest.raises(InputError, match=rf"is a prepared dataset, .* training file, .*{file}"):
        reader(folder)
    assert reader(folder / file)


def test_a_folder_without_text_or_with_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no \.txt file"):
        read_corpus(tmp_path)
    written(tmp_path / "full.txt", b"text")
    written(tmp_path / "sub/empty.txt", b"")
    with pytest.raises(InputError, match=r"sub/empty\.txt: holds no text"):
        read_corpus(tmp_path)


@pytest.mark.parametrize(("name", "target"), [("b.txt", "gone.txt"), ("books", "gone"), ("books", "..")])
def test_a_link_in_a_folder_that_leads_to_no_file_is_refused_by_name(
    tmp_path: Path, name: str, target: str
) -> None:
    written(tmp_path / "a.txt", b"text")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(InputError, match=rf"{name}: leads to no file .*put the file or folder itself there"):
        read_corpus(tmp_path)


def test_links_to_files_are_read_and_a_link_to_a_folder_may_be_given(tmp_path: Path) -> None:
    written(tmp_path / "aside/notes.md", b"not this")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").symlink_to(written(tmp_path / "aside/one.txt", b"one"))
    (tmp_path / "corpus/notes.md").symlink_to("../aside/notes.md")
    (tmp_path / "corpus/.hidden").symlink_to("nowhere")
    (tmp_path / "link").symlink_to("corpus")
    assert read_corpus(tmp_path / "link") == "one"


def test_a_folder_of_a_corpus_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a.txt", b"text")
    written(tmp_path / "closed/b.txt", b"text")
    listed = os.scandir

    def refuse(folder: Path) -> object:  # whoever runs the tests may be root, to whom no folder is closed
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"closed: cannot be read \(Permission denied\); check the path and"):
        read_corpus(tmp_path)


def test_documents_lie_between_blank_lines() -> None:
    text = "\n\n  one \nstill one\n \t\n\n\ntwo\n\nthree"
    assert split_documents(text) == ("  one \nstill one", "two", "three")
    assert split_documents("one\ntwo\n") == ("one\ntwo",)
    assert split_documents(" \n \n\tone") == ("\tone",)
    assert split_documents(" \n\n ") == ()


def test_code_keeps_its_indentation() -> None:
    code = "class A:\n\n    def f(self):\n        return 1\n\n    y = 2  \n"
    assert split_documents(code) == ("class A:", "    def f(self):\n        return 1", "    y = 2  ")


@given(st.lists(st.text(alphabet="xy\n ", min_size=1), max_size=6))
def test_documents_are_whole_and_without_blank_lines(pieces: list[str]) -> None:
    text = "\n\n".join(pieces)
    documents = split_documents(text)
    assert "".join("".join(documents).split()) == "".join(text.split())
    for document in documents:
        assert document in text
        assert all(line.strip() for line in document.split("\n"))
    assert split_documents("\n\n".join(documents)) == documents


@pytest.mark.parametrize(("position", "start"), [(0, 5), (5, 5), (8, 5), (9, 11), (11, 11), (17, 11)])
def test_a_cut_goes_to_the_nearest_start_of_a_document_but_the_first(position: int, start: int) -> None:
    assert document_cut("one\n\ntwo \n\nthr\n\n\n", position) == start
    assert document_cut("\n\n  one\n\n", position) == 0  # there is no other


@given(st.text(alphabet="xy\n ").filter(str.strip), st.integers(0, 40))
def test_a_cut_leaves_all_documents_whole(text: str, position: int) -> None:
    cut = document_cut(text, position)
    assert split_documents(text[:cut]) + split_documents(text[cut:]) == split_documents(text)
    assert bool(cut) == (len(split_documents(text)) > 1)


@pytest.mark.parametrize(("validation", "warns"), [(4, True), (5, False), (20, False), (21, True)])
def test_a_share_off_by_more_than_twice_is_worth_a_warning(validation: int, warns: bool) -> None:
    assert bool(share_warning(validation, 100, 0.1)) is warns
