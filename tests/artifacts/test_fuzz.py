"""Mutants of bundles and checkpoints: refused by the documented error, or exactly what a writer writes.

The soak's million takes a hundred times as long as the ten thousand of every test run: about 35 minutes where
those take 20 seconds.
"""

import collections
import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ArtifactError
from artifacts.packed_nf4 import decode_packed, encode_packed
from tests.artifacts.bundles import spell, zipped_entries
from tests.artifacts.checkpoints import contents_of
from tests.artifacts.mutants import BUNDLES, CHECKPOINTS, Kind, mutant
from tests.artifacts.test_packed_nf4 import STATES, single

ROOT = Path(__file__).parents[2]
COUNTS = [5_000, pytest.param(500_000, marks=pytest.mark.soak)]


def outcome(kind: Kind, data: bytes, seed: bytes) -> str:
    """The code of the refusal, or "accepted" for what proves to be canonical; any other error escapes."""
    try:
        artifact = kind.read(data)
    except kind.error as error:
        return error.code
    manifest, members = contents_of(data)
    assert artifact.to_bytes() == data
    assert zipped_entries([("manifest.json", spell(kind.identified(manifest))), *members.items()]) == data
    assert kind.described(manifest, members) == manifest
    if manifest[kind.id_key] == contents_of(seed)[0][kind.id_key]:
        assert data == seed
    return "accepted"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [BUNDLES, CHECKPOINTS], ids=["bundles", "checkpoints"])
def test_mutants_are_refused_or_canonical(kind, count):
    outcomes = collections.Counter()
    for number in range(count):
        data, seed = mutant(kind, number)
        try:
            outcomes[outcome(kind, data, seed)] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} of {kind.error.__name__}'s files: {error!r}") from error
    assert outcomes["accepted"] > count / 100  # mutants that mean something else reach the end
    assert len(outcomes) >= 14, outcomes  # and the others, every kind of check


@given(st.data())
def test_packed_states_with_other_bytes_are_refused_or_canonical(data):
    state = bytearray(data.draw(st.sampled_from([*STATES, single()])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(state) - 1))
        piece = data.draw(st.binary(max_size=8))
        state[at : at + data.draw(st.sampled_from([0, len(piece)]))] = piece
    with contextlib.suppress(ArtifactError):
        assert encode_packed(decode_packed(bytes(state))) == state


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris: pip install atheris")
def test_coverage_guided_inputs_are_refused_or_canonical(tmp_path):
    command = [sys.executable, "-m", "tests.artifacts.fuzz_atheris", "-runs=200000", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
