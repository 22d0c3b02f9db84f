"""A fault at every system call of a publication: killed, disk full, I/O error, a write cut short.

The shim `faults.c` is preloaded into one child process, which forks for every case: the fork publishes and
meets the fault, its parent checks what is left and publishes again.
"""

import ctypes
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from artifacts import ModelBundle, ModelConfig, StepRecord, Store, StoreError, TokenizerSpec, step_key
from artifacts.fsck import check_store
from artifacts.garbage import collect

SOURCE = Path(__file__).with_name("faults.c")
KEY = step_key("train", 1, {})
FAULTS = {"kill": -1, "short write": -2, "ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
CODES = {"ENOSPC": {"disk-full", "disk"}, "EIO": {"disk"}}
"""What an error may be called; a full disk that answers while it is read is but a disk."""

CONFIG = ModelConfig(
    vocabulary_size=3, maximum_context=2, model_width=2, head_count=1, block_count=1, feed_forward_width=1
)


def publish(root: Path, tell: Callable[[str], object]) -> list[str]:
    """All that a step does with its results, each told once it is done; returns all that was told."""
    told = []

    def done(reference: str) -> None:
        told.append(reference)
        tell(reference)

    store = Store.open(root)
    done(log := store.put_bytes("metrics", b"log of a run\n" * 100).digest)
    parameters = CONFIG.parameter_specs()
    weights = np.arange(sum(parameter.count for parameter in parameters), dtype=np.float32)
    bundle = ModelBundle(CONFIG, TokenizerSpec("byte", (97, 98, 99)), parameters, weights, stage="test")
    model = store.put_bundle(bundle)
    done(model.digest)
    record = StepRecord("train", 1, {}, {"model": model, "log": store.ref("metrics", log)}, 1.5)
    assert store.remember(KEY, record) == record
    done(f"steps/{KEY}")
    store.name_run("demo", "train", KEY, record)
    done("runs/demo/train")
    tag = store.tag("best")
    if tag is None or tag.ref != model:
        store.set_tag("best", model, tag)
    done("tags/best")
    return told


def problems_of(root: Path, told: list[str]) -> list[str]:
    """What is wrong with a store, and what was told and is not there."""
    if not (root / "STORE.json").exists():
        return [f"lost {what}" for what in told]
    store = Store.open(root)
    found = [problem.message for problem in check_store(store, full=True).problems]
    for what in told:
        there = store.read_reference(what) is not None if "/" in what else store.has(what)
        found += [] if there else [f"lost {what}"]
    return found


class Campaign:
    """Cases in a folder; for the process that has the shim."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.shim = ctypes.CDLL(None)
        self.expected = publish(base / "expected", lambda what: None)

    def count(self, fault: str) -> int:
        """How many system calls a publication makes that the fault can meet."""
        self._arm(self.base / "counted", 0, fault)
        publish(self.base / "counted", lambda what: None)
        count = self.shim.fault_count()
        self._arm(Path(), 0, fault)
        return count

    def _arm(self, folder: Path, number: int, fault: str) -> None:
        path = b"" if folder == Path() else os.fsencode(folder)
        self.shim.fault_arm(path, number, FAULTS[fault])

    def case(self, fault: str, number: int) -> list[str]:
        """What went wrong when call `number` met the fault."""
        root = self.base / f"{fault} {number}"
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            self._suffer(root, number, fault, writer)
        os.close(writer)
        with os.fdopen(reader) as stream:
            lines = [json.loads(line) for line in stream]
        status = os.waitpid(child, 0)[1]
        told = [line["told"] for line in lines if "told" in line]
        wrong = [line["wrong"] for line in lines if "wrong" in line]
        if fault == "kill" and not os.WIFSIGNALED(status):
            wrong.append("was not killed")
        if fault == "short write" and told != self.expected:
            wrong.append("a write cut short was not gone on with")
        wrong += problems_of(root, told)
        if publish(root, lambda what: None) != self.expected:
            wrong.append("came to another end when run again")
        wrong += problems_of(root, self.expected)
        left = collect(Store.open(root)).temporary
        if len(left) > 1 or (left and fault == "short write"):
            wrong.append(f"left {left}")
        shutil.rmtree(root)
        return wrong

    def _suffer(self, root: Path, number: int, fault: str, writer: int) -> None:
        def say(what: str, text: str) -> None:
            os.write(writer, json.dumps({what: text}).encode() + b"\n")

        self._arm(root, number, fault)
        try:
            publish(root, lambda text: say("told", text))
            if self.shim.fault_hits() != 1:
                say("wrong", "met no fault")
        except StoreError as error:
            if error.code not in CODES[fault] or str(root) not in str(error):
                say("wrong", f"error {error.code}: {error}")
        except BaseException as error:
            say("wrong", f"raised {error!r}")
        os._exit(0)


def main(base: str) -> None:
    """Print one line of JSON for each case: the fault, the number of the call, what went wrong."""
    campaign = Campaign(Path(base))
    for fault in FAULTS:
        for number in range(1, campaign.count(fault) + 1):
            print(json.dumps([fault, number, campaign.case(fault, number)]), flush=True)
        shutil.rmtree(campaign.base / "counted")


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def test_no_fault_of_any_system_call_damages_the_store_or_escapes_its_errors(shim):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        script = f"from {__name__} import main; main({base!r})"
        environment = os.environ | {"LD_PRELOAD": str(shim)}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment, cwd=SOURCE.parents[2], capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case[2]] == []
    counts = {fault: len(list(group)) for fault, group in itertools.groupby(cases, lambda case: case[0])}
    assert counts.keys() == FAULTS.keys()
    assert counts["kill"] == counts["EIO"] == counts["ENOSPC"] >= 100
    assert counts["short write"] >= 5
    print(f"{len(cases)} cases: {counts}")
