"""What many tests share: the fixtures made by the original, and the real texts where they are at hand."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FIXTURES = Path(__file__).parent / "fixtures"
_SHARED = Path(__file__).parents[2] / "shared" / "data"
SHARED_DATA = _SHARED if _SHARED.is_dir() else None

needs_shared_data = pytest.mark.skipif(SHARED_DATA is None, reason="the real texts are not at hand")


def fixture(name: str) -> Any:
    """The parsed JSON of one fixture file."""
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


def float32_tensor(text: str) -> torch.Tensor:
    """A flat tensor from a fixture's base64 of little-endian float32."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy())
