"""Text from files, and documents from text.

Files are strict UTF-8 with universal newlines (`\r\n` and `\r` become `\n`). A byte order mark at the very
start is an editor's signature, not text, and is dropped: kept, it would become three tokens of the first
document. Blank lines part documents and belong to none. Everything else, indentation and trailing spaces
included, reaches the tokenizer as it is on disk.
"""

import codecs
import os
import re
from collections.abc import Iterator
from pathlib import Path

from artifacts import is_prepared_dataset
from riftco.errors import InputError

_NEWLINE = re.compile(r"\r\n?")
_BLANK_LINES = re.compile(r"\n\s*\n")
_SIGNATURES = {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
}
_RECORDS = {".jsonl", ".csv", ".parquet", ".gz"}


def read_text(path: str | os.PathLike[str]) -> str:
    """The whole text of one file.

    InputError when it is missing, a folder, unreadable, empty or blank, or not UTF-8 (with its line).
    """
    text = universal_newlines(decode_utf8(read_bytes(path), source=shown(path)))
    if not text.strip():
        raise InputError(f"{shown(path)}: holds no text; put some in it or give another file")
    return text


def read_corpus(path: str | os.PathLike[str]) -> str:
    """The text of one file, or of every `.txt` file below a folder, joined by blank lines.

    A folder's files come in the order of their paths (by code point, so the same everywhere); files and
    folders whose name starts with a dot are left out. InputError as `read_text`, for a folder that cannot be
    read, a link that leads to no file, a prepared dataset, a file of records or packed data (.jsonl, .csv,
    .parquet, .gz), or if there is no text file.
    """
    root = Path(path)
    if not root.is_dir():
        if root.suffix.lower() in _RECORDS:
            raise InputError(
                f"{shown(root)}: is no plain text by its name; write its texts to a .txt file, with blank "
                "lines between them"
            )
        return read_text(root)
    _refuse_prepared(root)
    files = sorted(_text_files(root), key=Path.as_posix)
    if not files:
        raise InputError(f"{shown(root)}: has no .txt file in it; add one or give another folder")
    return "\n\n".join(read_text(file).strip("\n") for file in files)


def split_documents(text: str) -> tuple[str, ...]:
    """The documents between blank lines (lines of nothing but white space), their own lines as they are."""
    return tuple(filter(None, _BLANK_LINES.split(f"\n\n{text}\n\n")))


def document_cut(text: str, position: int) -> int:
    """Where the document starts, other than the first, whose start is nearest to a position; 0 for none."""
    first, end = len(text) - len(text.lstrip()), len(text.rstrip())
    starts = (blank.end() for blank in _BLANK_LINES.finditer(text, first, end))
    return min(starts, key=lambda start: abs(start - position), default=0)


def share_warning(validation: int, total: int, fraction: float) -> str:
    """What to say where validation has less than half or more than twice its share; both in characters."""
    if not total or fraction / 2 <= validation / total <= 2 * fraction:
        return ""
    return (
        f"validation has {validation:,} of {total:,} characters where validation_fraction is {fraction}: the "
        "text is cut between documents, of which some are long; part them with blank lines"
    )


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes; InputError saying why it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{shown(path)}: no such file; check the path") from None
    except IsADirectoryError:
        _refuse_prepared(Path(path))
        raise InputError(f"{shown(path)}: is a folder; give the path of a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unreadable(path, error) from None


def decode_utf8(data: bytes, *, source: str) -> str:
    """Strict UTF-8 without the byte order mark; InputError naming source, line and byte, or what it may be.

    UTF-16 without its mark is valid UTF-8 with many a NUL, by chance; one byte in four is taken for it.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    looks_like = next((kind for mark, kind in _SIGNATURES.items() if data.startswith(mark)), "")
    if not looks_like and data.count(0) * 4 > len(data):
        looks_like = "UTF-16"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = universal_newlines(data[: error.start].decode("utf-8")).count("\n") + 1
        wrong = f"looks like {looks_like}" if looks_like else f"byte 0x{data[error.start]:02x}"
        raise InputError(f"{source}:{line}: not UTF-8 ({wrong}); save the file as UTF-8") from None
    if looks_like in ("UTF-16", "a zip archive"):  # whose bytes may be UTF-8 by chance
        raise InputError(f"{source}:1: not UTF-8 (looks like {looks_like}); save the file as UTF-8")
    return text


def universal_newlines(text: str) -> str:
    """Every `\\r\\n` and lone `\\r` as `\\n`, as Python's text mode reads them."""
    return _NEWLINE.sub("\n", text)


def shown(path: str | os.PathLike[str]) -> str:
    """A path fit for a message: names that are not text are escaped rather than unprintable."""
    return os.fspath(path).encode("utf-8", "backslashreplace").decode("utf-8")


def _text_files(folder: Path) -> Iterator[Path]:
    """The text files below a folder; InputError for a folder or a link whose text would be missed."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from None
    for entry in visible:
        path = folder / entry.name
        is_text = path.suffix.lower() == ".txt"
        if entry.is_dir(follow_symlinks=False):
            yield from _text_files(path)
        elif is_text or entry.is_symlink():
            _require_file(path)
            if is_text:
                yield path


def _refuse_prepared(folder: Path) -> None:
    if is_prepared_dataset(folder):
        files = ", ".join(shown(file) for file in sorted(folder.glob("train.*")))
        raise InputError(
            f"{shown(folder)}: is a prepared dataset, whose validation and test records are not for "
            f"training; give its training file, {files}"
        )


def _require_file(path: Path) -> None:
    if not os.path.isfile(path):
        raise InputError(
            f"{shown(path)}: leads to no file that can be read (links to folders are not followed); put the "
            "file or folder itself there, or remove it"
        )


def _unreadable(path: str | os.PathLike[str], error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"{shown(path)}: cannot be read ({reason}); check the path and its rights")
