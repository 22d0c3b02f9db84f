"""The compiled CPU code: C++ behind a plain C interface, one library for each level of instructions.

The libraries are built with the package by the system's compiler. Here the best one that this machine can run
is chosen; without any, every operation falls back to torch. RIFTCO_NATIVE=off|baseline|v3|v4 chooses another,
and a path chooses a library built by hand.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

_LEVELS = {"baseline": 2, "v3": 3, "v4": 4}

Pointer = ctypes.c_void_p
Integer = ctypes.c_int64
Float = ctypes.c_float
Double = ctypes.c_double


@functools.cache
def library() -> ctypes.CDLL | None:
    """The chosen library, or None. RuntimeError if RIFTCO_NATIVE asks for one that is not there."""
    asked = os.environ.get("RIFTCO_NATIVE", "")
    if asked == "off":
        return None
    if "/" in asked:
        return ctypes.CDLL(asked)
    baseline = _open("baseline")
    machine = baseline.riftco_machine_level() if baseline else 0
    usable = [name for name, level in _LEVELS.items() if level <= machine]
    for name in [asked] if asked else reversed(usable):
        found = _open(name) if name in usable else None
        if found:
            return found
    if asked:
        raise RuntimeError(f"RIFTCO_NATIVE={asked}: built and runnable here are {usable or 'none'}")
    return None


def _open(name: str) -> ctypes.CDLL | None:
    path = next(Path(__file__).parent.glob(f"_{name}.*"), None)
    return ctypes.CDLL(str(path)) if path else None


def function(name: str, *argument_types: Any, result: Any = ctypes.c_int) -> Callable[..., int] | None:
    """The C function of that name and types; None if there is no library or not this function.

    It releases the interpreter's lock while it runs.
    """
    found = getattr(library(), name, None)
    if found is not None:
        found.argtypes, found.restype = argument_types, result
    return found


def pointer(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's elements begin, or None."""
    return None if tensor is None else tensor.data_ptr()


def describe() -> str:
    """One line for people: which library runs here, or that none does and how to get one."""
    found = library()
    if found is None:
        return (
            "kernels: NO NATIVE CODE, slow torch fallbacks: install a C++20 compiler (g++ 11+) and reinstall"
        )
    level = Path(found._name).name.split(".")[0].strip("_")
    return f"kernels: native code {level}, {found.riftco_lanes()} float32 lanes"
