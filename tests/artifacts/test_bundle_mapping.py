"""A loaded bundle maps its weights: little memory before they are used, and a file of its own afterwards."""

import hashlib
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from artifacts import BundleError, ModelBundle, ModelConfig, ParameterSpec
from artifacts.bundle_manifest import BundleManifest
from artifacts.zip_layout import Member, archive, directory, join
from tests.artifacts.bundles import TOKENIZER, small_bundle

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20

MEASURE = """
import sys
import numpy
from artifacts import ModelBundle

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

ModelBundle.load(sys.argv[1])
before = peak()
bundle = ModelBundle.load(sys.argv[2])
print(peak() - before, bundle.weights.size, float(bundle.weights[-1]))
"""


def write_zeros(path: Path, size: int) -> None:
    """A bundle of `size` bytes of zero weights, which the file does not really hold."""
    digest, crc = hashlib.sha256(), 0
    for _ in range(size // MEBIBYTE):
        digest.update(bytes(MEBIBYTE))
        crc = zlib.crc32(bytes(MEBIBYTE), crc)
    config = ModelConfig(3, 2, 2, 1, 1, 1)
    parameters = (ParameterSpec("zeros", (size // 4,)),)
    manifest = BundleManifest(config, TOKENIZER, parameters, digest.hexdigest(), "pretraining", None, b"{}")
    _, data = manifest.encode()
    members = [Member("manifest.json", len(data), zlib.crc32(data)), Member("weights.f32le", size, crc)]
    with path.open("wb") as stream:
        stream.write(join(members[0].local_header()) + data + join(members[1].local_header()))
        stream.seek(size, os.SEEK_CUR)
        stream.write(join(directory(members)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
@pytest.mark.parametrize(
    ("size", "bound"),
    [(256 * MEBIBYTE, 16 * MEBIBYTE), pytest.param(1024 * MEBIBYTE, 64 * MEBIBYTE, marks=pytest.mark.soak)],
)
def test_a_large_bundle_opens_in_little_memory(tmp_path, size, bound):
    write_zeros(tmp_path / "large.rift", size)
    small_bundle().save(tmp_path / "small.rift")
    command = [sys.executable, "-c", MEASURE, tmp_path / "small.rift", tmp_path / "large.rift"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    kibibytes, count, last = done.stdout.split()
    assert (int(count), last) == (size // 4, "0.0")
    assert int(kibibytes) * 1024 < bound


@pytest.mark.parametrize("place", [4096, 5 * MEBIBYTE, 9 * MEBIBYTE - 4096])
def test_every_part_of_a_large_bundle_is_hashed(tmp_path, place):
    path = tmp_path / "large.rift"
    write_zeros(path, 9 * MEBIBYTE)
    begin = path.read_bytes().index(bytes(MEBIBYTE))
    with path.open("r+b") as stream:
        stream.seek(begin + place)
        stream.write(b"\1")
    with pytest.raises(BundleError) as refused:
        ModelBundle.load(path)
    assert refused.value.code == "checksum"


def test_replacing_or_removing_the_file_does_not_disturb_a_loaded_bundle(tmp_path):
    path = small_bundle(0).save(tmp_path / "model.rift")
    loaded = ModelBundle.load(path)
    small_bundle(1).save(path)
    assert loaded.to_bytes() == small_bundle(0).to_bytes()
    assert ModelBundle.load(path) == small_bundle(1)
    path.unlink()
    assert loaded.weights.tobytes() == small_bundle(0).weights.tobytes()


def test_a_mapped_bundle_can_be_saved_onto_its_own_file(tmp_path):
    path = small_bundle().save(tmp_path / "model.rift")
    loaded = ModelBundle.load(path)
    assert loaded.save(path).read_bytes() == loaded.to_bytes() == small_bundle().to_bytes()
    assert ModelBundle.load(path) == loaded


def test_a_read_only_file_can_be_mapped(tmp_path):
    path = small_bundle().save(tmp_path / "model.rift")
    path.chmod(0o444)
    assert ModelBundle.load(path) == small_bundle()


def test_mapped_weights_cannot_be_changed(tmp_path):
    loaded = ModelBundle.load(small_bundle().save(tmp_path / "model.rift"))
    for array in (loaded.weights, *loaded.tensors().values()):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_weights_behind_a_manifest_of_any_length_can_be_computed_with(tmp_path):
    for length in range(4):
        bundle = small_bundle(metadata={"x": "y" * length})
        loaded = ModelBundle.load(bundle.save(tmp_path / "model.rift"))
        assert np.array_equal(loaded.weights * 2, bundle.weights * 2)
        assert loaded.weights.sum() == bundle.weights.sum()
        assert np.array_equal(np.array(loaded.weights), bundle.weights)


def test_bytes_that_change_later_do_not_change_the_bundle():
    data = bytearray(small_bundle().to_bytes())
    bundle = ModelBundle.from_bytes(data)  # type: ignore[arg-type]
    data[:] = bytes(len(data))
    assert bundle.to_bytes() == small_bundle().to_bytes()


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = small_bundle().save(tmp_path / "model.rift")
    size = path.stat().st_size
    decode = BundleManifest.decode

    def truncate_then_decode(data):
        os.truncate(path, size - 10)
        return decode(data)

    monkeypatch.setattr("io.DEFAULT_BUFFER_SIZE", 16)
    monkeypatch.setattr(BundleManifest, "decode", truncate_then_decode)
    with pytest.raises(BundleError):
        ModelBundle.load(path)


@pytest.mark.parametrize("position", [0, 300_000, 599_999])
def test_values_that_are_not_finite_are_found_anywhere(tmp_path, position):
    weights = np.zeros(600_000, np.float32)
    weights[position] = np.inf
    manifest = BundleManifest(
        ModelConfig(3, 2, 2, 1, 1, 1),
        TOKENIZER,
        (ParameterSpec("w", weights.shape),),
        hashlib.sha256(weights.data).hexdigest(),
        "pretraining",
        None,
        b"{}",
    )
    _, data = manifest.encode()
    members = [("manifest.json", data), ("weights.f32le", weights.view(np.uint8).data)]
    path = tmp_path / "model.rift"
    path.write_bytes(b"".join(archive(members)))
    with pytest.raises(BundleError) as caught:
        ModelBundle.load(path)
    assert caught.value.code == "not-finite"
