"""Coverage-guided fuzzing of the readers, by hand or from a soak test: needs `pip install atheris`.

    python -m tests.artifacts.fuzz_atheris -runs=1000000 FOLDER

The folder keeps what reached new code; the intact files are put there first. The first byte of an input says
what the rest is: a file, the manifest of an otherwise intact file, or a packed NF4 state.
"""

import contextlib
import hashlib
import json
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["artifacts"]):
    import artifacts.packed_nf4
from artifacts import ArtifactError
from tests.artifacts.bundles import spell, zipped_entries
from tests.artifacts.checkpoints import contents_of
from tests.artifacts.mutants import BUNDLES, CHECKPOINTS, Kind
from tests.artifacts.test_fuzz import outcome
from tests.artifacts.test_packed_nf4 import STATES

KINDS = (BUNDLES, CHECKPOINTS)


def read_file(kind: Kind, data: bytes) -> None:
    """Let a reader judge the bytes of a file."""
    outcome(kind, data, kind.seeds[0])


def read_manifest(kind: Kind, data: bytes) -> None:
    """Let a reader judge a manifest, as it is and with the id of its content, in front of intact members."""
    manifests = [data]
    with contextlib.suppress(ValueError, RecursionError, AttributeError):  # no JSON, or no object
        manifests.append(spell(kind.identified(json.loads(data))))
    for seed in kind.seeds[-2:]:
        for manifest in manifests:
            outcome(kind, zipped_entries([("manifest.json", manifest), *contents_of(seed)[1].items()]), seed)


def read_packed(data: bytes) -> None:
    """Let the codec judge a packed state."""
    try:
        weights = artifacts.packed_nf4.decode_packed(data)
    except ArtifactError:
        return
    assert artifacts.packed_nf4.encode_packed(weights) == data


def read_input(data: bytes) -> None:
    """One input of the fuzzer: any exception but the documented one ends it."""
    choice, rest = data[:1], data[1:]
    if choice == b"p":
        read_packed(rest)
    elif choice in (b"m", b"M"):
        read_manifest(KINDS[choice == b"M"], rest)
    else:
        read_file(KINDS[choice == b"F"], rest)


def write_seeds(folder: Path) -> None:
    """The intact inputs, named by their hashes as the fuzzer does."""
    inputs = [b"p" + state for state in STATES]
    for kind, file_choice, manifest_choice in ((BUNDLES, b"f", b"m"), (CHECKPOINTS, b"F", b"M")):
        for seed in kind.seeds:
            inputs.append(file_choice + seed)
            length = int.from_bytes(seed[18:22], "little")
            inputs.append(manifest_choice + seed[43 : 43 + length])
    for data in inputs:
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if not argument.startswith("-"):
            Path(argument).mkdir(exist_ok=True)
            write_seeds(Path(argument))
    atheris.Setup([*sys.argv, "-max_len=40000"], read_input)
    atheris.Fuzz()
