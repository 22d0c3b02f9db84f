"""Writers killed at random moments: nothing is damaged, nothing acknowledged lost, the work can be redone."""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from artifacts import StepRecord, Store, step_key
from artifacts.fsck import check_store
from artifacts.garbage import collect
from tests.artifacts.children import Child, Say

ROUNDS_PER_STORE = 25


@pytest.fixture
def base(tmp_path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses nothing that it has written."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def work(store: Store, item: str, say: Say) -> str:
    """Store two results, the second the same for all writers, and say each once it is safe."""
    name, _, number = item.rpartition("-")
    result = store.put_bytes("metrics", f"result {item} ".encode() * 500)
    say(["object", result.digest])
    shared = store.put_bytes("metrics", f"shared {number} ".encode() * 500)
    say(["object", shared.digest])
    key = step_key("train", 1, {"item": item})
    record = StepRecord("train", 1, {"item": item}, {"result": result, "shared": shared}, 1.5)
    store.remember(key, record)
    say(["reference", f"steps/{key}"])
    store.name_run(f"run-{name}", "train", key, record)
    say(["run", item])
    return result.digest


def write_until_killed(root: Path, name: str, say: Say) -> None:
    store = Store.open(root)
    for number in range(100_000):
        say(["began", f"{name}-{number}"])
        work(store, f"{name}-{number}", say)


def assert_kept(store: Store, said: list[list[str]]) -> None:
    """All that was acknowledged is there and intact."""
    for kind, what in said:
        if kind == "object":
            store.objects.check(what)
        elif kind == "reference":
            assert store.read_reference(what) is not None
            assert store.recall(what.removeprefix("steps/")) is not None
        elif kind == "run":
            name, _, number = what.rpartition("-")
            named = store.run_stages(f"run-{name}")["train"].record.recipe["item"]
            assert int(named.rpartition("-")[2]) >= int(
                number
            )  # or a later one that could not be said any more


@pytest.mark.parametrize("kills", [200, pytest.param(5_000, marks=pytest.mark.soak)], ids=["quick", "full"])
def test_kills_of_two_writers_damage_and_lose_nothing(base, kills):
    chance = random.Random(kills)
    interrupted = acknowledged = left = 0
    for turn in range(kills // 2):
        root = base / f"store-{turn // ROUNDS_PER_STORE}"
        store = Store.open(root)
        writers = [Child(partial(write_until_killed, root, f"{turn}.{letter}")) for letter in "ab"]
        time.sleep(chance.uniform(0.002, 0.030))
        for writer in writers:
            writer.kill()
            time.sleep(chance.uniform(0, 0.002))
        for said in [writer.wait() for writer in writers]:
            assert "error" not in str(said)
            assert_kept(store, said)
            acknowledged += len(said)
            if said and said[-1][0] != "run":
                interrupted += 1
                item = [what for kind, what in said if kind == "began"][-1]
                store.objects.check(work(store, item, lambda what: None))
        if turn % ROUNDS_PER_STORE in (7, ROUNDS_PER_STORE - 1):
            assert check_store(store, full=True).problems == []
            left += len(os.listdir(root / "tmp"))
            collect(store)
            assert check_store(store, full=True).problems == []
    assert interrupted > kills / 4
    assert left > 0  # some were killed while they wrote
    print(f"{kills} kills, {interrupted} in the middle of work, {acknowledged} acknowledgements, {left} left")
