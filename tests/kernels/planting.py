"""Planting bugs in Triton kernels: a kernel's source with one line changed, in place of the kernel."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.jit import JITFunction

from tests.kernels.lab import KernelMemoryError

CAUGHT = (AssertionError, KernelMemoryError, pytest.fail.Exception)  # what a check raises that sees a bug


@dataclass(frozen=True)
class Patch:
    """A kernel (or a function that kernels call), what its checks are, and its bugs: (right, wrong) code.

    The right code occurs once in the kernel. The checks are those of the operation's tests, on the few cases
    that show all bugs, run under Triton's interpreter; they get pytest's monkeypatch.
    """

    module: ModuleType
    kernel: str
    checks: Callable[[pytest.MonkeyPatch], None]
    bugs: tuple[tuple[str, str], ...]


@contextmanager
def planted(patch: Patch, right: str, wrong: str, folder: Path) -> Iterator[None]:
    """Replace the kernels of the patch's module by those of its changed source, written to the folder."""
    source = inspect.getsource(patch.module)
    begin = source.index(f"def {patch.kernel}(")
    end = source.find("\n\n\n", begin)
    body = source[begin:end]
    assert body.count(right) == 1, (
        f"{patch.kernel} has {right!r} {body.count(right)} times: correct the patch"
    )
    path = folder / f"{patch.module.__name__.rsplit('.', 1)[1]}.py"
    path.write_text(source[:begin] + body.replace(right, wrong) + source[end:])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    with pytest.MonkeyPatch.context() as context:
        for name, value in vars(changed).items():
            if isinstance(value, JITFunction):
                context.setattr(patch.module, name, value)
        yield
