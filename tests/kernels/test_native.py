"""The compiled library: built here, chosen by level, and left out when it is asked to be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels.native
from kernels.native import function, library

BUILT = {path.name.split(".")[0].strip("_") for path in Path(kernels.native.__file__).parent.glob("_*.so")}


def described(level: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"RIFTCO_NATIVE": level}
    command = [sys.executable, "-m", "kernels.native"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_library_was_built():
    """Packages install without a compiler, but then these tests would not test the native code."""
    assert "baseline" in BUILT
    assert library() is not None


@pytest.mark.parametrize("level", ["baseline", "v3", "v4"])
def test_a_level_can_be_chosen(level):
    result = described(level)
    if level not in BUILT or "runnable here" in result.stderr:
        pytest.skip(f"{level} does not run here")
    assert f"native code {level}" in result.stdout


def test_without_native_code_the_fallback_is_announced():
    assert "NO NATIVE CODE" in described("off").stdout


def test_a_level_that_is_not_there_is_an_error():
    assert "RIFTCO_NATIVE=v9" in described("v9").stderr


def test_an_unknown_function_is_none():
    assert function("riftco_no_such_function") is None
