"""At least ten bugs planted in each kernel of GELU, layer norm, cross-entropy and NF4: the tests see all.

The first ten of each kernel are planted in every run, the others by `make soak`.
"""

import importlib
import re
from pathlib import Path

import pytest
from triton.runtime.errors import InterpreterError

from tests.kernels.cases import running
from tests.kernels.planting import CAUGHT, Patch, planted

HERE = Path(__file__).parent
OPERATIONS = sorted(path.parent.name for path in HERE.glob("*/bugs.py"))
PATCHES: dict[str, Patch] = {
    patch.kernel: patch
    for operation in OPERATIONS
    for patch in importlib.import_module(f"tests.kernels.{operation}.bugs").PATCHES
}
BUGS = [
    pytest.param(kernel, *bug, id=f"{kernel}-{number}", marks=[pytest.mark.soak] if number > 10 else [])
    for kernel, patch in PATCHES.items()
    for number, bug in enumerate(patch.bugs, 1)
]


@pytest.mark.parametrize("kernel", {patch.checks: kernel for kernel, patch in PATCHES.items()}.values())
def test_without_a_bug_the_checks_pass(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("triton"):
        PATCHES[kernel].checks(monkeypatch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for what the bugs compute
@pytest.mark.parametrize(("kernel", "right", "wrong"), BUGS)
def test_a_planted_bug_is_caught(
    kernel: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = PATCHES[kernel]
    with (
        planted(patch, right, wrong, tmp_path),
        running("triton"),
        pytest.raises((*CAUGHT, InterpreterError)) as caught,
    ):
        patch.checks(monkeypatch)
    assert isinstance(caught.value, CAUGHT) or isinstance(caught.value.__cause__, CAUGHT)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kernel_has_ten_bugs(operation: str) -> None:
    """A kernel is what is launched; functions that kernels call have bugs of their own beside these."""
    patches = [patch for patch in PATCHES.values() if f".{operation}." in patch.module.__name__]
    source = Path(patches[0].module.__file__ or "").read_text()
    assert set(re.findall(r"def (_\w+_kernel)\(", source)) <= {patch.kernel for patch in patches}
    assert all(len(patch.bugs) >= 10 for patch in patches)
