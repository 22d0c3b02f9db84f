"""`import artifacts` is quick: it loads neither frameworks nor the libraries that only some stores need."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_loads_no_heavy_library():
    code = "import sys, artifacts; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "artifacts.store" in loaded
    assert not loaded & {"torch", "prefect", "pyarrow", "fsspec", "pydantic", "riftco"}
