"""What a disk may hold after a power loss, worked out from what a program asked of it.

`Recorder` writes down every change that real code makes below a folder, and can kill the code after any of
them. `Disk` replays the record and enumerates what may be left at any moment. It believes only what was
synced: a file's bytes once the file was, a name in a folder once the folder was. Everything later is there or
not, each name for itself: a rename may show its old name, its new one, both or neither, and a file may hold
the old bytes, the new ones, a part of them, or zeros.
"""

import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "folder"
State = dict[str, bytes | str]
"""Path below the recorded folder -> the bytes of a file, or FOLDER."""

Node = int | str | None
"""What a name stands for: the number of a file, FOLDER, or nothing."""


class Killed(BaseException):
    """The program was killed. No `except Exception` sees it, and no clean-up reaches the disk after it."""


@dataclass(frozen=True)
class Operation:
    """One change: its kind, the path it changes, and a source, a size, or an offset and bytes."""

    kind: str
    path: str
    value: Any = None


class Recorder:
    """The changes that code makes below a folder, in order."""

    def __init__(self, base: Path, past: Sequence[Operation] = ()) -> None:
        """`past` is what was done before to what lies in the folder `base` now."""
        self.base = base
        self.operations = list(past)
        self._paths: dict[int, str] = {}
        self._left = -1

    def acknowledge(self, *paths: Path) -> None:
        """Write down that somebody was told: these paths hold from now on what they hold now."""
        self.operations += [Operation("acknowledge", self._name(path)) for path in paths]

    @contextmanager
    def recording(self, kill_after: int = -1) -> Iterator[None]:
        """Record what is done in this block; with `kill_after`, Killed ends it after so many changes."""
        self._left = kill_after
        wrapped = {
            "open": self._open,
            "write": self._write,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "ftruncate": self._truncate,
            "posix_fallocate": self._reserve,
            "link": self._two_paths("link"),
            "replace": self._two_paths("rename"),
            "rename": self._two_paths("rename"),
            "unlink": self._one_path("unlink"),
            "remove": self._one_path("unlink"),
            "mkdir": self._one_path("mkdir"),
            "rmdir": self._one_path("rmdir"),
        }
        original = {name: getattr(os, name) for name in wrapped}
        for name, wrapper in wrapped.items():
            setattr(os, name, self._wrap(wrapper, original[name]))
        try:
            yield
        finally:
            for name, call in original.items():
                setattr(os, name, call)

    def _wrap(self, wrapper: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: wrapper(call, *arguments, **options)

    def _change(self, kind: str, path: str, value: Any, call: Callable[[], Any]) -> Any:
        if self._left == 0:
            raise Killed
        result = call()
        self._left -= 1
        self.operations.append(Operation(kind, path, value))
        return result

    def _name(self, path: Any, folder: int | None = None) -> str:
        full = Path(self.base, self._paths[folder], path) if folder is not None else Path(path)
        return os.path.relpath(full, self.base)

    def _open(self, call, path, flags, mode=0o777, *, dir_fd=None):
        name = self._name(path, dir_fd)
        new = flags & os.O_CREAT and not os.path.lexists(self.base / name)

        def run() -> int:
            return call(path, flags, mode, dir_fd=dir_fd)

        descriptor = self._change("create", name, None, run) if new else run()
        self._paths[descriptor] = name
        return descriptor

    def _write(self, call, descriptor, data):
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        return self._change(
            "write", self._paths[descriptor], (offset, bytes(data)), lambda: call(descriptor, data)
        )

    def _sync(self, call, descriptor):
        self._change("sync", self._paths[descriptor], None, lambda: call(descriptor))

    def _truncate(self, call, descriptor, size):
        self._change("resize", self._paths[descriptor], size, lambda: call(descriptor, size))

    def _reserve(self, call, descriptor, offset, size):
        size = max(offset + size, os.fstat(descriptor).st_size)
        self._change("resize", self._paths[descriptor], size, lambda: call(descriptor, 0, size))

    def _one_path(self, kind: str) -> Callable[..., None]:
        def wrapper(call, path, *arguments, dir_fd=None):
            self._change(kind, self._name(path, dir_fd), None, lambda: call(path, *arguments, dir_fd=dir_fd))

        return wrapper

    def _two_paths(self, kind: str) -> Callable[..., None]:
        def wrapper(call, source, target):
            self._change(kind, self._name(target), self._name(source), lambda: call(source, target))

        return wrapper


@dataclass
class Disk:
    """A disk and what is certain about it; every list runs from what is certain to what programs see now."""

    names: dict[str, list[Node]] = field(default_factory=dict)
    contents: dict[int, list[bytes]] = field(default_factory=dict)
    promises: dict[str, set[bytes | str | None]] = field(default_factory=dict)
    """Path -> what it may hold: what it held when somebody was told so, or what was put there since."""

    def apply(self, operation: Operation) -> None:
        """Do one more operation."""
        getattr(self, f"_{operation.kind}")(operation.path, operation.value)
        if operation.path in self.promises:
            self.promises[operation.path].add(self.seen(operation.path))
        if operation.kind == "rename" and operation.value in self.promises:
            self.promises[operation.value].add(None)

    def seen(self, path: str) -> bytes | str | None:
        """What programs see under this path: bytes, FOLDER or None."""
        node = self._node(path)
        return self.contents[node][-1] if isinstance(node, int) else node

    def current(self) -> State:
        """All that programs see."""
        names = {path: history[-1] for path, history in self.names.items()}
        return self._state(names, {file: versions[-1] for file, versions in self.contents.items()})

    def states(self, limit: int) -> Iterator[State]:
        """What may be left if the power goes now: every combination, or `limit` of them drawn by chance.

        Temporary files, which nothing may rely on, are all lost, or all there with half the bytes not synced.
        """
        scratch = {path for path, history in self.names.items() if _is_scratch(path) and len(history) > 1}
        open_names = {
            path: list(dict.fromkeys(history))
            for path, history in self.names.items()
            if path not in scratch and len(set(history)) > 1
        }
        named = {node for path, history in self.names.items() if not _is_scratch(path) for node in history}
        open_files = {file: _versions(self.contents[file]) for file in named if isinstance(file, int)}
        open_files = {file: versions for file, versions in open_files.items() if len(versions) > 1}
        axes = [*open_names.values(), *open_files.values(), *([[False, True]] if scratch else [])]
        certain = {path: history[-1] for path, history in self.names.items() if path not in open_names}
        for choice in _choices(axes, limit):
            names = certain | dict(zip(open_names, choice, strict=False))
            files = dict(zip(open_files, choice[len(open_names) :], strict=False))
            kept = bool(scratch) and choice[-1]
            for path in scratch:
                names[path] = next((node for node in self.names[path] if kept and node is not None), None)
            yield self._state(names, files)

    def _state(self, names: dict[str, Node], files: dict[int, bytes]) -> State:
        state: State = {}
        for path in sorted(names):
            node, folder = names[path], _folder_of(path)
            if node is None or (folder != "." and state.get(folder) != FOLDER):
                continue
            state[path] = FOLDER
            if isinstance(node, int):
                versions = self.contents[node]
                torn = versions[-1][: len(versions[-1]) // 2] if len(versions) > 1 else versions[-1]
                state[path] = files.get(node, torn)
        return state

    def _node(self, path: str) -> Node:
        return self.names.get(path, [None])[-1]

    def _file(self, path: str) -> int:
        file = self._node(path)
        assert isinstance(file, int), f"{path} is no file"
        return file

    def _name(self, path: str, node: Node) -> None:
        self.names.setdefault(path, [None]).append(node)

    def _create(self, path: str, _: None) -> None:
        file = len(self.contents)
        self.contents[file] = [b""]
        self._name(path, file)

    def _write(self, path: str, value: tuple[int, bytes]) -> None:
        offset, data = value
        versions = self.contents[self._file(path)]
        before = versions[-1].ljust(offset, b"\0")
        versions.append(before[:offset] + data + before[offset + len(data) :])

    def _resize(self, path: str, size: int) -> None:
        versions = self.contents[self._file(path)]
        versions.append(versions[-1][:size].ljust(size, b"\0"))

    def _sync(self, path: str, _: None) -> None:
        node = FOLDER if path == "." else self._node(path)
        if isinstance(node, int):
            del self.contents[node][:-1]
            return
        for name, history in self.names.items():
            if _folder_of(name) == path:
                del history[:-1]

    def _link(self, target: str, source: str) -> None:
        self._name(target, self._file(source))

    def _rename(self, target: str, source: str) -> None:
        if self._node(target) != self._node(source):  # two names of one file: POSIX does nothing
            self._name(target, self._node(source))
            self._name(source, None)

    def _unlink(self, path: str, _: None) -> None:
        self._name(path, None)

    def _mkdir(self, path: str, _: None) -> None:
        self._name(path, FOLDER)

    _rmdir = _unlink

    def _settle(self, path: str, _: None) -> None:
        for history in [*self.names.values(), *self.contents.values()]:
            del history[:-1]

    def _acknowledge(self, path: str, _: None) -> None:
        self.promises[path] = {self.seen(path)}


def replayed(operations: Iterable[Operation]) -> Disk:
    """The disk after the operations."""
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    return disk


@functools.cache
def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


@functools.cache
def _is_scratch(path: str) -> bool:
    return "/tmp/" in f"/{path}" or path.endswith(".tmp")


def _versions(history: list[bytes]) -> list[bytes]:
    if len(history) == 1:
        return history
    new = history[-1]
    return list(dict.fromkeys([*history, new[: len(new) // 2], bytes(len(new)), b""]))


def _choices(axes: list[list[Any]], limit: int) -> Iterator[tuple[Any, ...]]:
    if math.prod(map(len, axes)) <= limit:
        yield from itertools.product(*axes)
        return
    yield tuple(axis[0] for axis in axes)
    yield tuple(axis[-1] for axis in axes)
    draw = random.Random(limit)  # the same states in every run
    for _ in range(limit - 2):
        yield tuple(draw.choice(axis) for axis in axes)


def tree(base: Path) -> State:
    """What really lies below a folder."""
    return {
        str(path.relative_to(base)): FOLDER if path.is_dir() else path.read_bytes()
        for path in base.rglob("*")
    }


def plant(state: State, base: Path) -> None:
    """Make an empty folder hold the state."""
    for path, content in state.items():  # folders come before what is in them
        if isinstance(content, bytes):
            (base / path).write_bytes(content)
        else:
            (base / path).mkdir()
