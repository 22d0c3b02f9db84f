"""Every Triton kernel compiles for real GPUs and uses what it is known to use; one that spills fails.

The launches are those of the Python wrappers, made on meta tensors. `RIFTCO_ACCEPT_RESOURCES=1` writes the
tables `tests/kernels/<operation>/resources.json` anew, for a change that is meant; a spill is never accepted.
The tables are of triton 3.9; with another version (`make old-triton`) the kernels have to compile, no more.
"""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from kernels.dispatch import use
from tests.kernels.lab import TARGETS, compile_for, resources

HERE = Path(__file__).parent
OPERATIONS = sorted(path.parent.name for path in HERE.glob("*/launches.py"))
ACCEPT = os.environ.get("RIFTCO_ACCEPT_RESOURCES") == "1"
SLACK = 1.1  # a register more is no event; a tenth more is


def launches(operation: str) -> dict[str, Callable[[], None]]:
    return importlib.import_module(f"tests.kernels.{operation}.launches").LAUNCHES


def compiled(operation: str, target: str) -> dict[str, Any]:
    """Kernels by launch and name; the launches of one wrapper may be of several kernels."""
    found = {}
    for name, launch in launches(operation).items():
        with use("triton"), compile_for(TARGETS[target]) as made:
            launch()
        assert made, f"{name} launches no kernel"
        for number, (kernel_name, kernel) in enumerate(made):
            found[f"{name} {number} {kernel_name}"] = kernel
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_use_what_they_are_known_to_use(operation: str, target: str) -> None:
    kernels = compiled(operation, target)
    if not triton.__version__.startswith("3.9."):
        return
    used = {name: resources(kernel) for name, kernel in kernels.items()}
    spilling = {name: found for name, found in used.items() if found["spills"] or found["stack"] > 64}
    assert not spilling
    path = HERE / operation / "resources.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    if ACCEPT:
        path.write_text(json.dumps(table | {target: used}, indent=1, sort_keys=True) + "\n")
        return
    known = table[target]
    assert used.keys() == known.keys()
    for name, found in used.items():
        for what in ("registers", "shared"):
            assert found[what] <= known[name][what] * SLACK, f"{name} on {target}: {what}"
        assert found["matrix"] >= known[name]["matrix"] / SLACK, f"{name} on {target}: matrix instructions"


def test_every_operation_with_a_triton_kernel_is_compiled() -> None:
    folders = {path.parent.name for path in (HERE.parents[1] / "kernels").glob("*/triton*.py")}
    assert folders == set(OPERATIONS)
