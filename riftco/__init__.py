"""riftco: the model package. Everything here runs without Prefect; torch is imported on first use."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from riftco.model import ModelSnapshot
    from riftco.runtime import ModelRuntime, capture_bundle

__all__ = ["ModelRuntime", "ModelSnapshot", "capture_bundle"]
__version__ = "0.1.0"

# How long the OpenMP threads of torch's own operations spin at a barrier before they sleep, read when torch
# loads it. By default it is milliseconds, which beside a busy process makes two threads far slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_HOMES = {
    "ModelRuntime": "riftco.runtime",
    "capture_bundle": "riftco.runtime",
    "ModelSnapshot": "riftco.model",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'riftco' has no attribute {name!r}")
