"""`riftco run pipeline`, Prefect and all, killed at random moments, ends with the same artifacts."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artifacts import Store
from tests.tiny import SETTINGS

KILLS = 10


def _command(home: Path) -> subprocess.Popen[bytes]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-c", "from flows.cli import main; main()", "run", "pipeline", *settings],
        env={**os.environ, "RIFTCO_HOME": str(home)},
        cwd=home,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _bundles(home: Path) -> dict[str, str]:
    store = Store.open(home / "store")
    refs = {name: s.record.results.get("bundle") for name, s in store.run_stages("tiny").items()}
    return {name: store.load_bundle(ref).artifact_id for name, ref in refs.items() if ref}


@pytest.mark.soak
def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for home in (undisturbed, killed):
        home.mkdir()
    started = time.monotonic()
    assert _command(undisturbed).wait() == 0
    seconds = time.monotonic() - started
    moments = random.Random(5)
    for _ in range(KILLS):
        run = _command(killed)
        time.sleep(moments.uniform(0.2, 1.0) * seconds)
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert _command(killed).wait() == 0
    assert _bundles(killed) == _bundles(undisturbed)
    assert len(Store.open(killed / "store").run_stages("tiny")) == 16
