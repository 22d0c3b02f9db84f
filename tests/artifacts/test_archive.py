"""Archives: one spelling for the same content, everything checked on the way in, no path taken from one."""

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts import ArtifactError, Store, StoreError
from artifacts.archive import export, import_
from artifacts.records import seal
from tests.artifacts.remote_stores import contents, finish, full_store

LONG = "r" * 128


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Store:
    """With names of the greatest length, which need more room than a tar's header has."""
    store = full_store(tmp_path_factory.mktemp("archive") / "source")
    finish(store, LONG, LONG, {"inputs": {}, "config": 1}, store.put_bytes("text", bytes(70_000)))
    return store


@pytest.fixture(scope="module")
def archive(source) -> bytes:
    path = source.root.parent / "module.tar"
    export(source, path)
    return path.read_bytes()


@pytest.fixture
def target(tmp_path) -> Store:
    return Store.open(tmp_path / "target", durability="none")


def refused(target: Store, path: Path, data: bytes) -> str:
    """The message with which these bytes are refused; no reference has come in."""
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        import_(target, path)
    assert caught.value.code == "archive"
    assert target.reference_names() == []
    assert os.listdir(target.root / "tmp") == [] if (target.root / "tmp").exists() else True
    return str(caught.value)


def members(data: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def rebuilt(parts: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    blocks = []
    for info, data in parts:
        info.size = len(data) if info.isreg() else 0
        blocks += [info.tobuf(tarfile.GNU_FORMAT), data if info.isreg() else b""]
        blocks.append(bytes(-len(blocks[-1]) % 512))
    return b"".join(blocks) + bytes(1024)


def member(name: str, data: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = 0o444
    return info, data


def test_an_exported_store_is_imported_whole(source, archive, target, tmp_path):
    path = tmp_path / "store.tar"
    done = export(source, path)
    assert path.read_bytes() == archive
    assert (done.objects, done.references) == (len(source.digests()), len(source.reference_names()))
    assert import_(target, path) == done
    assert contents(target.root) == contents(source.root)
    again = import_(target, path)
    assert (again.objects, again.references, again.skipped) == (0, 0, done.objects + done.references)


def test_large_objects_are_streamed(target, tmp_path):
    store = Store.open(tmp_path / "large", durability="none")
    finish(store, "demo", "corpus", {"inputs": {}}, store.put_bytes("data", os.urandom(2_500_000)))
    export(store, tmp_path / "large.tar")
    import_(target, tmp_path / "large.tar")
    assert contents(target.root) == contents(store.root)


def test_the_same_content_gives_the_same_bytes_wherever_it_lies(archive, target, tmp_path):
    (tmp_path / "module.tar").write_bytes(archive)
    import_(target, tmp_path / "module.tar")
    export(target, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archive


def test_any_tar_can_read_it(source, archive, tmp_path):
    (tmp_path / "module.tar").write_bytes(archive)
    subprocess.run(["tar", "-xf", "module.tar"], cwd=tmp_path, check=True)
    assert contents(tmp_path) == contents(source.root)
    assert rebuilt(members(archive)) == archive  # as Python reads and writes it


def test_a_pipe_is_refused_before_anything_is_read(target, archive, tmp_path):
    reading, writing = os.pipe()
    os.write(writing, archive[:512])
    with pytest.raises(ArtifactError, match=f"/dev/fd/{reading}, which is no file: save it"):
        import_(target, f"/dev/fd/{reading}")
    assert os.read(reading, 512) == archive[:512]
    for end in (reading, writing):
        os.close(end)


def test_a_name_brings_what_it_was_made_from(source, target, tmp_path):
    export(source, tmp_path / "some.tar", ["demo/pretrain"])
    import_(target, tmp_path / "some.tar")
    assert sorted(name.partition("/")[0] for name in target.reference_names()) == [
        "artifacts",
        "runs",
        "steps",
        "steps",
    ]
    assert len(target.digests()) == 2


def test_progress_ends_with_all_bytes(source, target, tmp_path):
    seen: list[tuple[int, int, str]] = []
    export(source, tmp_path / "store.tar", progress=lambda *what: seen.append(what))
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(source.path(source.ref("object", digest)).stat().st_size for digest in source.digests())
    )
    seen.clear()
    import_(target, tmp_path / "store.tar", progress=lambda *what: seen.append(what))
    assert [count for count, _, _ in seen] == sorted(count for count, _, _ in seen)
    assert 0 < seen[-1][0] <= seen[-1][1]


def test_a_damaged_object_is_not_exported_and_the_old_archive_stays(tmp_path):
    store = full_store(tmp_path / "store")
    path = tmp_path / "store.tar"
    path.write_bytes(b"the old one")
    file = store.path(store.resolve("best"))
    file.chmod(0o644)
    for data in (file.read_bytes()[:-1] + b"?", b"", file.read_bytes() + b"?"):
        file.write_bytes(data)
        with pytest.raises(StoreError, match="damaged"):
            export(store, path)
    file.unlink()
    with pytest.raises(StoreError, match="missing"):
        export(store, path)
    assert path.read_bytes() == b"the old one"
    assert sorted(os.listdir(tmp_path)) == ["store", "store.tar"]


def test_a_damaged_local_object_is_repaired_by_an_import(source, archive, target, tmp_path):
    (tmp_path / "module.tar").write_bytes(archive)
    import_(target, tmp_path / "module.tar")
    file = target.path(target.resolve("best"))
    file.chmod(0o644)
    file.write_bytes(b"?")
    assert import_(target, tmp_path / "module.tar").objects == 1
    assert contents(target.root) == contents(source.root)


def test_any_changed_byte_of_a_header_or_reference_is_noticed(archive, target, tmp_path):
    start = archive.index(b"refs/artifacts") // 512 * 512
    long_name = archive.index(f"{LONG}/{LONG}".encode())
    places = [*range(0, 1024, 19), *range(start, len(archive), 29)]
    for place in places:
        if 0 <= place - long_name < 2 * len(LONG):
            continue  # tar's checksum does not cover what is beyond the hundredth character of a name
        data = bytearray(archive)
        data[place] ^= 1
        refused(target, tmp_path / "bad.tar", bytes(data))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 80_000), bit=st.integers(0, 7))
def test_any_changed_bit_is_noticed(archive, target, tmp_path, place, bit):
    data = bytearray(archive)
    data[place % archive.index(b"refs/runs")] ^= 1 << bit
    refused(target, tmp_path / "bad.tar", bytes(data))


def test_any_end_that_is_too_early_or_too_late_is_noticed(archive, target, tmp_path):
    for length in [
        0,
        1,
        511,
        512,
        700,
        *range(1024, len(archive), 5_021),
        len(archive) - 512,
        len(archive) - 1,
    ]:
        refused(target, tmp_path / "bad.tar", archive[:length])
    for more in (b"\0", bytes(512), b"x", archive):
        assert "after its end" in refused(target, tmp_path / "bad.tar", archive + more)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/tmp/outside",
        "objects/sha256/../../outside",
        f"objects/sha256/00/{'1' * 64}",
        f"objects/sha256/aa/{'A' * 64}",
        f"./objects/sha256/aa/{'a' * 64}",
        "refs/other/x",
        "refs/tags/../x",
        "refs/runs/a",
        "refs/steps/short",
        "refs/",
        "tmp/x",
        "",
        "STORE.json",
    ],
)
def test_members_that_no_store_holds_are_refused_and_never_written(archive, target, tmp_path, name):
    parts = members(archive)
    for place in (1, len(parts)):
        refused(target, tmp_path / "bad.tar", rebuilt([*parts[:place], member(name), *parts[place:]]))
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"7", b"\0"]
)
def test_only_regular_members_are_read(archive, target, tmp_path, kind):
    parts = members(archive)
    parts[1][0].type = kind
    parts[1][0].linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    refused(target, tmp_path / "bad.tar", rebuilt(parts))


@pytest.mark.parametrize(
    "change",
    [
        "swapped",
        "twice",
        "object last",
        "reference first",
        "no marker",
        "marker last",
        "references swapped",
        "reference twice",
    ],
)
def test_the_order_is_part_of_the_format(archive, target, tmp_path, change):
    marker, *parts = members(archive)
    changed = {
        "swapped": [marker, parts[1], parts[0], *parts[2:]],
        "twice": [marker, parts[0], *parts],
        "object last": [marker, *parts[1:], parts[0]],
        "reference first": [marker, parts[-1], *parts[:-1]],
        "no marker": parts,
        "marker last": [*parts, marker],
        "references swapped": [marker, *parts[:-2], parts[-1], parts[-2]],
        "reference twice": [marker, *parts, parts[-1]],
    }
    refused(target, tmp_path / "bad.tar", rebuilt(changed[change]))


@pytest.mark.parametrize("field", ["mtime", "uid", "mode", "uname"])
def test_headers_say_nothing_of_their_own(archive, target, tmp_path, field):
    parts = members(archive)
    setattr(parts[1][0], field, "root" if field == "uname" else 1)
    refused(target, tmp_path / "bad.tar", rebuilt(parts))


@pytest.mark.parametrize("size", [2**33, 2**62, 8**11 - 1])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_forged_size_reserves_nothing(archive, target, tmp_path, size, place):
    parts = members(archive)
    info, data = parts[place]
    info.size = size
    before = rebuilt(parts[: place if place >= 0 else len(parts) - 1])[:-1024]
    refused(target, tmp_path / "bad.tar", before + info.tobuf(tarfile.GNU_FORMAT) + data)


def test_a_reference_that_does_not_read_is_refused_before_any_is_written(archive, target, tmp_path):
    parts = members(archive)
    for data in (b"", b"{}", seal({}), seal({"digest": "../x", "kind": "x", "size": 1})):
        refused(target, tmp_path / "bad.tar", rebuilt([*parts[:-1], (parts[-1][0], data)]))


def test_a_reference_without_its_object_is_refused(archive, target, tmp_path):
    marker, first, *rest = members(archive)
    path = tmp_path / "less.tar"
    path.write_bytes(rebuilt([marker, *rest]))
    digest = hashlib.sha256(first[1]).hexdigest()
    with pytest.raises(StoreError, match=digest) as caught:
        import_(target, path)
    assert caught.value.code == "missing"


def test_an_archive_of_another_version_is_refused(archive, target, tmp_path):
    (info, data), *rest = members(archive)
    message = refused(target, tmp_path / "bad.tar", rebuilt([(info, data.replace(b":1}", b":2}")), *rest]))
    assert "later version" in message


def test_a_file_that_is_absent_is_the_callers_error(target, tmp_path):
    with pytest.raises(FileNotFoundError):
        import_(target, tmp_path / "absent.tar")


def test_a_damaged_reference_is_named_and_no_archive_written(tmp_path):
    store = full_store(tmp_path / "source")
    path = store.root / "refs" / "runs" / "demo" / "corpus"
    path.chmod(0o644)
    path.write_bytes(b"{")
    for names in ((), ("demo",)):
        with pytest.raises(StoreError, match="runs/demo/corpus is damaged") as caught:
            export(store, tmp_path / "store.tar", names)
        assert caught.value.code == "damaged-reference"
    assert not (tmp_path / "store.tar").exists()


def test_a_dry_import_writes_nothing_and_says_what_the_import_then_does(source, archive, target, tmp_path):
    (tmp_path / "store.tar").write_bytes(archive)
    finish(target, "demo", "corpus", {"inputs": {}, "config": 2}, target.put_bytes("text", b"mine"))
    before = contents(target.root)
    planned = import_(target, tmp_path / "store.tar", dry_run=True)
    assert contents(target.root) == before
    assert planned.replaced == ["demo/corpus"]
    assert set(planned.copied) == {*source.digests(), *source.reference_names()}
    done = import_(target, tmp_path / "store.tar")
    assert (done, done.copied, done.replaced) == (planned, planned.copied, planned.replaced)


def test_a_dry_import_reads_all_of_the_archive(archive, target, tmp_path):
    path = tmp_path / "bad.tar"
    path.write_bytes(archive[:-1] + b"x")
    with pytest.raises(ArtifactError) as caught:
        import_(target, path, dry_run=True)
    assert caught.value.code == "archive"


def test_an_import_gives_tags_that_moved_apart_their_meaning_by_force(archive, target, tmp_path):
    (tmp_path / "store.tar").write_bytes(archive)
    target.set_tag("best", target.put_bytes("text", b"mine"), after=None)
    with pytest.raises(StoreError, match=r"best.*--force"):
        import_(target, tmp_path / "store.tar")
    import_(target, tmp_path / "store.tar", force=True)
    assert target.resolve("best").kind == "bundle"
