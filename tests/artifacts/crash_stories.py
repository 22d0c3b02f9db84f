"""Stories of work on a store that a power loss ends, and the survey of what it can leave.

Each story is two pieces of work: the first by itself, then killed at every moment and the second going on
from there. A state is checked here, by a reading of the files of its own, and some by the store as well.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from artifacts import Ref, RemoteStore, StepRecord, Store, pull, push, step_key, write_atomic
from artifacts.fsck import check_store
from artifacts.garbage import collect
from artifacts.workspace import METRICS_DIGEST
from tests.artifacts.bundles import small_bundle
from tests.artifacts.checkpoints import small_checkpoint
from tests.artifacts.crash_model import (
    Disk,
    Killed,
    Operation,
    Recorder,
    State,
    plant,
    replayed,
    tree,
)

Acknowledge = Callable[..., None]
Job = Callable[[Path, Acknowledge], object]

OLD, NEW = step_key("train", 1, {"seed": 0}), step_key("train", 1, {"seed": 1})


def open_store(base: Path) -> Store:
    return Store.open(base / "home" / "store")


def reference(store: Store, name: str) -> Path:
    return store.root / "refs" / name


def put(base: Path, acknowledge: Acknowledge, data: bytes = b"metrics of a run") -> Ref:
    store = open_store(base)
    ref = store.put_bytes("metrics", data)
    acknowledge(store.path(ref))  # not STORE.json: whoever opens the store next makes it again
    return ref


def publish(base: Path, acknowledge: Acknowledge, seed: int = 1) -> StepRecord:
    """What a step does with its result."""
    store, key = open_store(base), (OLD, NEW)[seed]
    bundle = small_bundle(seed)
    model = store.put_bundle(bundle)
    acknowledge(store.path(model), reference(store, f"artifacts/{bundle.artifact_id}"))
    log = store.put_bytes("metrics", b"log %d" % seed)
    record = store.remember(key, StepRecord("train", 1, {"seed": seed}, {"model": model, "log": log}, 1.5))
    acknowledge(store.path(log), reference(store, f"steps/{key}"))
    store.name_run("demo", "train", key, record)
    acknowledge(reference(store, "runs/demo/train"))
    return record


def put_and_name(base: Path, acknowledge: Acknowledge) -> None:
    """One object and one name, of a run."""
    store = open_store(base)
    record = StepRecord("train", 1, {"seed": 0}, {"log": store.put_bytes("metrics", b"log 0")}, 1.5)
    store.name_run("demo", "train", OLD, store.remember(OLD, record))
    acknowledge(reference(store, "runs/demo/train"))


def put_garbage(base: Path, acknowledge: Acknowledge) -> Ref:
    return put(base, acknowledge, b"metrics 0")


def move_tag(base: Path, acknowledge: Acknowledge) -> Ref:
    """Let `best` mean another object, unless it does."""
    store = open_store(base)
    ref = store.put_bytes("metrics", b"chosen")
    tag = store.tag("best")
    if tag is None or tag.ref != ref:
        store.set_tag("best", ref, tag)
        acknowledge(store.path(ref), reference(store, "tags/best"))
    return ref


def tag_what_is_seen(base: Path, acknowledge: Acknowledge) -> None:
    """Let `best` mean an object that somebody else has put, or is about to put."""
    store = open_store(base)
    ref = store.ref("metrics", hashlib.sha256(b"metrics of a run").hexdigest())
    tag = store.tag("best")
    if store.has(ref.digest) and (tag is None or tag.ref != ref):
        store.set_tag("best", ref, tag)
        acknowledge(store.path(ref), reference(store, "tags/best"))


def forget(base: Path, acknowledge: Acknowledge) -> None:
    store = open_store(base)
    store.forget("demo")
    acknowledge(reference(store, "runs/demo/train"))


def collect_garbage(base: Path, _: Acknowledge) -> None:
    collect(open_store(base))


def collect_unnamed(base: Path, _: Acknowledge) -> None:
    store = open_store(base)
    for name in store.reference_names():
        os.utime(reference(store, name), (0, 0))  # young ones would be spared
    collect(store, unnamed=True)


def save(base: Path, acknowledge: Acknowledge, data: bytes = b"new checkpoint") -> None:
    """Write a checkpoint into a folder that may be new."""
    acknowledge(write_atomic(base / "home" / "runs" / "demo.riftckpt", data, sync=True))


def save_old(base: Path, acknowledge: Acknowledge) -> None:
    save(base, acknowledge, b"the checkpoint before")


def save_point(base: Path, acknowledge: Acknowledge, step: int = 2) -> None:
    """Keep what a killed training is to go on from: metrics first, then the checkpoint that names them."""
    workspace, metrics = open_store(base).workspace(NEW), b"%d" % step
    digest = hashlib.sha256(metrics).hexdigest()
    workspace.save(small_checkpoint(global_step=step, metadata={METRICS_DIGEST: digest}), metrics)
    acknowledge(*(workspace.folder / f"{step:012d}.{end}" for end in ("jsonl", "riftckpt")))


def save_first_point(base: Path, acknowledge: Acknowledge) -> None:
    save_point(base, acknowledge, 1)


def push_all(base: Path, acknowledge: Acknowledge) -> None:
    """Copy the store into a folder beside it."""
    store, folder = open_store(base), base / "home" / "copy"
    push(store, RemoteStore.open(f"file://{folder}", writable=True))
    paths = [store.path(store.ref("object", digest)) for digest in store.digests()]
    paths += [reference(store, name) for name in store.reference_names()]
    acknowledge(folder / "STORE.json", *(folder / path.relative_to(store.root) for path in paths))


def put_push(base: Path, acknowledge: Acknowledge) -> None:
    """A store with a run, and its copy."""
    put_and_name(base, acknowledge)
    push_all(base, acknowledge)


def pull_all(base: Path, acknowledge: Acknowledge) -> None:
    """Copy what was pushed into a store of another folder."""
    store = Store.open(base / "home" / "back")
    pull(store, RemoteStore.open(f"file://{base / 'home' / 'copy'}"))
    paths = [store.path(store.ref("object", digest)) for digest in store.digests()]
    acknowledge(*paths, *(reference(store, name) for name in store.reference_names()))


def history(base: Path, acknowledge: Acknowledge) -> None:
    """A store with a past: a run, a tag, garbage."""
    publish(base, acknowledge, 0)
    store = open_store(base)
    store.set_tag("best", store.put_bytes("metrics", b"first"), None)
    acknowledge(reference(store, "tags/best"))
    store.put_bytes("metrics", b"metrics 0")
    save_old(base, acknowledge)


STORIES: dict[str, list[Job]] = {
    "a new store": [put, put],
    "put": [history, put, put],
    "put, then tag what is seen": [history, put, tag_what_is_seen],
    "publish": [history, publish, publish],
    "publish, then collect": [history, publish, collect_garbage],
    "publish, then collect unnamed": [history, publish, collect_unnamed],
    "move a tag": [history, move_tag, move_tag],
    "move a tag, then collect": [history, move_tag, collect_garbage],
    "move a tag, then publish": [history, move_tag, publish],
    "forget, then collect": [history, forget, collect_garbage],
    "forget, then collect unnamed": [history, forget, collect_unnamed],
    "forget, then publish": [history, forget, publish],
    "collect, then put what was garbage": [history, collect_garbage, put_garbage],
    "collect, then publish": [history, collect_garbage, publish],
    "collect unnamed, then publish": [history, collect_unnamed, publish],
    "collect twice": [history, collect_unnamed, collect_unnamed],
    "push": [put_and_name, push_all, push_all],
    "pull": [put_push, pull_all, pull_all],
    "save into a new folder": [save_old, save],
    "save again": [history, save, save],
    "save a resume point": [history, save_first_point, save_point],
}


def faults_of(state: State, promises: dict[str, set[bytes | str | None]]) -> list[str]:
    """What is wrong in a state, read without the store's code."""
    faults = [f"lost {path}" for path, contents in promises.items() if state.get(path) not in contents]
    objects = set()
    for path, content in state.items():
        if "/objects/sha256/" in path and isinstance(content, bytes):
            objects.add((path.partition("/objects/")[0], Path(path).name))
            if hashlib.sha256(content).hexdigest() != Path(path).name:
                faults.append(f"torn {path}")
    for path, content in state.items():
        if "/refs/" in path and isinstance(content, bytes):
            store = path.partition("/refs/")[0]
            here = {digest for place, digest in objects if place == store}
            faults += [f"{fault} {path}" for fault in _reference_faults(content, here)]
    return faults


def _reference_faults(content: bytes, objects: set[str]) -> list[str]:
    try:
        fields = json.loads(content)
        seal = fields.pop("sha256")
    except (ValueError, KeyError, AttributeError):
        return ["torn"]
    spelled = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    named = re.findall(rb'"digest":"([0-9a-f]{64})"', content)
    dangling = ["dangling" for digest in named if digest.decode() not in objects]
    return dangling if hashlib.sha256(spelled).hexdigest() == seal else ["torn"]


EXPECTED: dict[Job, object] = {}
"""What each job returns on an intact disk."""


def learn_expected(base: Path) -> None:
    """Fill EXPECTED, in an empty folder."""
    for number, job in enumerate([put, publish, move_tag, put_garbage]):
        place = base / str(number)
        place.mkdir()
        EXPECTED[job] = job(place, lambda *paths: None)
    silent = [save, save_old, save_point, save_first_point]
    silent += [put_and_name, push_all, put_push, pull_all]
    silent += [forget, collect_garbage, collect_unnamed, tag_what_is_seen]
    EXPECTED.update(dict.fromkeys(silent))


class Survey:
    """The states of many stories: how many there were, and what was wrong."""

    def __init__(self, scratch: Path, *, limit: int, stride: int) -> None:
        """At most `limit` states for one moment; one new state in `stride` is also run again for real."""
        self.count = 0
        self.rerun = 0
        self.faults: list[str] = []
        self._seen: set[int] = set()
        self._scratch, self._limit, self._stride = scratch, limit, stride

    @property
    def different(self) -> int:
        """How many different states there were."""
        return len(self._seen)

    def look(self, story: "Story") -> None:
        """Check what a power loss may leave after each change of the story's last job that ran."""
        disk = Disk()
        for number, operation in enumerate(story.operations):
            disk.apply(operation)
            for state in disk.states(self._limit) if number >= story.start else ():
                self.count += 1
                promises = frozenset((path, frozenset(held)) for path, held in disk.promises.items())
                mark = hash((frozenset(state.items()), promises))
                if mark in self._seen:
                    continue
                self._seen.add(mark)
                self.faults += [f"{fault} after {number}" for fault in faults_of(state, disk.promises)]
                if not self.faults and len(self._seen) % self._stride == 0:
                    self._run_again(state, story.jobs)

    def _run_again(self, state: State, jobs: list[Job]) -> None:
        """The store finds nothing wrong in the state, and the work ends there as it does elsewhere."""
        base = self._scratch / str(self.rerun)
        base.mkdir(parents=True)
        self.rerun += 1
        plant(state, base)
        if "home/store/STORE.json" in state:
            self.faults += [problem.message for problem in check_store(open_store(base), full=True).problems]
        for job in jobs:
            if job(base, lambda *paths: None) != EXPECTED[job]:
                self.faults.append(f"{job.__name__} came to another end in {base}")
        if (base / "home/store").exists():
            self.faults += [problem.message for problem in check_store(open_store(base), full=True).problems]


@dataclass(frozen=True)
class Story:
    """What jobs do to the disk, up to a kill or to the end."""

    jobs: list[Job]
    operations: list[Operation]
    start: int
    """The operation from which on the moments are new: those before were looked at in another story."""


def killed_everywhere(base: Path, jobs: list[Job]) -> Iterator[Story]:
    """First the last job but one by itself; then it is killed at every moment, and the last job goes on.

    All jobs before these two are the past: what they did has reached the disk.
    """
    past = [*noted(base / "past", [], jobs[:-2]), Operation("settle", "")]
    alone = noted(base / "alone", past, jobs[-2:-1])
    start = len(past) - 1
    yield Story(jobs[-2:-1], alone, start)
    changes = sum(operation.kind != "acknowledge" for operation in alone[start + 1 :])
    for moment in range(changes + 1):
        killed = noted(base / f"killed-{moment}", past, jobs[-2:-1], kill_after=moment)
        operations = noted(base / f"again-{moment}", killed, jobs[-1:])
        yield Story(jobs[-2:], operations, len(killed))


def noted(base: Path, past: Sequence[Operation], jobs: list[Job], kill_after: int = -1) -> list[Operation]:
    """The past and what the jobs do to the disk it left, until they are killed."""
    base.mkdir(parents=True)
    plant(replayed(past).current(), base)
    recorder = Recorder(base, past)
    with suppress(Killed), recorder.recording(kill_after):
        for job in jobs:
            job(base, recorder.acknowledge)
    assert replayed(recorder.operations).current() == tree(base)  # nothing went past the recorder
    return recorder.operations


def survey(base: Path, stories: dict[str, list[Job]], *, limit: int, stride: int) -> Survey:
    """Look at all moments of the stories; see `Survey`."""
    found = Survey(base / "states", limit=limit, stride=stride)
    for name, jobs in stories.items():
        for story in killed_everywhere(base / name, jobs):
            found.look(story)
    return found
