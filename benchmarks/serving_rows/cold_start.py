"""How soon a bundle of 500 MB is served: from the end of the imports to the first token over HTTP.

Run as a script with the path of a bundle, it serves that bundle once and prints the seconds as JSON.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.harness import Row, row

_BUNDLE = "large.rift"


def rows(folder: Path, rounds: int) -> Iterator[Row]:
    """The best of the rounds; the file is in the system's cache, as it was just written."""
    path = _write(folder)
    size = path.stat().st_size
    command = [sys.executable, str(Path(__file__)), str(path)]
    turns = []
    for _ in range(rounds):
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        turns.append(json.loads(finished.stdout.splitlines()[-1]))
    best: dict[str, Any] = min(turns, key=lambda turn: turn["first_token"])
    title = f"a bundle of {size / 1e6:.0f} MB: first token over HTTP after the imports"
    more = {f"{name}_s": round(best[name], 3) for name in ("imports", "listening")}
    yield row(title, best["first_token"], "s", "must be", 1.0, 1.0, **more)


def _write(folder: Path) -> Path:
    from artifacts import ModelBundle, ModelConfig, TokenizerSpec

    vocabulary = 5120
    config = ModelConfig(vocabulary, 256, 1024, 16, 9, 4096)
    pairs = [(left, right) for left in range(32, 127) for right in range(32, 127)][: vocabulary - 256]
    merges = tuple((*pair, 256 + rank) for rank, pair in enumerate(pairs))
    specs = config.parameter_specs()
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)
    flat = np.resize(some, sum(spec.count for spec in specs))
    bundle = ModelBundle(config, TokenizerSpec("bpe", merge_rules=merges), specs, flat, stage="benchmark")
    return bundle.save(folder / _BUNDLE)


def _serve_once(path: str) -> dict[str, float]:
    """Serve a bundle, ask it for a token, and stop; seconds of each since the imports."""
    import os
    import signal
    import threading

    import httpx

    begin = time.perf_counter()
    from riftco.config import ServingConfig
    from riftco.serving import serve

    imported = time.perf_counter()
    seconds = {"imports": imported - begin}

    def ask(url: str) -> None:
        try:
            body = {"prompt": "ab", "max_new_tokens": 1}
            httpx.post(f"{url}/v1/generate", json=body, timeout=60, trust_env=False).raise_for_status()
            seconds["first_token"] = time.perf_counter() - imported
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def ready(url: str) -> None:
        seconds["listening"] = time.perf_counter() - imported
        threading.Thread(target=ask, args=(url,)).start()

    serve(path, port=0, config=ServingConfig(backend="cpu"), ready=ready)
    return seconds


if __name__ == "__main__":
    print(json.dumps(_serve_once(sys.argv[1])))
