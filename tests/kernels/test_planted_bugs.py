"""At least ten bugs planted in each Triton kernel: the tests see all.

The first three of each kernel are planted in every run, all of them by `make soak`.
"""

import importlib
import re
from pathlib import Path

import pytest
from triton.runtime.errors import InterpreterError

from tests.kernels.cases import running
from tests.kernels.planting import CAUGHT, Patch, planted

KERNELS = Path(__file__).parents[2] / "kernels"
OPERATIONS = sorted({path.parent.name for path in KERNELS.glob("*/triton_*.py")})
PATCHES: dict[str, Patch] = {
    patch.kernel: patch
    for operation in OPERATIONS
    for patch in importlib.import_module(f"tests.kernels.{operation}.bugs").PATCHES
}
BUGS = [
    pytest.param(kernel, *bug, id=f"{kernel}-{number}", marks=[pytest.mark.soak] if number > 3 else [])
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
        pytest.raises((*CAUGHT, InterpreterError, ValueError)) as caught,
    ):
        patch.checks(monkeypatch)
    error = caught.value.__cause__ if isinstance(caught.value, InterpreterError) else caught.value
    assert isinstance(error, CAUGHT) or "not finite" in str(error)  # what an operation says of its results


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kernel_has_ten_bugs(operation: str) -> None:
    """A kernel is what is launched; functions that kernels call have bugs of their own beside these."""
    sources = [path.read_text() for path in (KERNELS / operation).glob("triton_*.py")]
    kernels = {name for source in sources for name in re.findall(r"def (_\w+_kernel)\(", source)}
    assert kernels
    assert kernels <= set(PATCHES)
    assert all(len(patch.bugs) >= 10 for patch in PATCHES.values())
