"""One rank of a job: `python -m riftco.training.rank_process FOLDER`, started by torch's launcher.

It ends at once when the process that launched it is gone, or the job.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from artifacts import ArtifactError, write_atomic
from riftco.errors import NonFiniteError
from riftco.log import LOGGER
from riftco.training.jobs import run_job
from riftco.training.launch import JOB, STOP, Report
from riftco.training.rank_events import EVENTS, EventLog, EventWriter, leader_sink
from riftco.training.ranks import is_leader

_POLL_SECONDS = 0.1


def main(folder: Path) -> int:
    """Run the job of a folder as the rank that the environment names; the exit code."""
    try:
        job = json.loads((folder / JOB).read_bytes())
    except FileNotFoundError:  # over before this process was up
        return 1
    reports = Path(job["reports"])
    threading.Thread(target=_watch, args=(folder, job["launcher"]), daemon=True).start()
    # Ranks of one machine talk over its loopback, which no other machine can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        torch.set_num_threads(job["threads"])
        with open(reports / EVENTS if is_leader() else os.devnull, "ab", buffering=0) as stream:
            LOGGER.propagate = False
            writer = EventWriter(stream)
            LOGGER.addHandler(EventLog(writer))
            sample_steps = job["config"]["sample_steps"]
            run_job(folder, job, leader_sink(writer, tracked=job["tracked"], sample_steps=sample_steps))
            writer.flush()
    except Exception as error:
        return _reported(reports, error)
    return 0


def _reported(reports: Path, error: Exception) -> int:
    """Say what ended this rank; the exit code, which is the disk's errno if that refuses the report."""
    rank = int(os.environ["RANK"])
    facts = error.facts if isinstance(error, NonFiniteError) else None
    if isinstance(error, ArtifactError):
        facts = {"code": error.code}
    text = traceback.format_exc()
    report = Report(rank, time.time_ns(), type(error).__name__, str(error), text, facts)
    try:
        write_atomic(reports / f"failure-{rank}.json", json.dumps(asdict(report)).encode())
    except OSError as refused:
        return refused.errno or 1
    return 1


def _watch(folder: Path, launcher: int) -> None:
    """Turn the caller's wish to stop into a SIGTERM of our own; end with the caller, or with the job.

    The caller may have gone while this process was still importing, so its id comes with the job.
    """
    stopping = False
    while os.getppid() == launcher and (folder / JOB).exists():
        if not stopping and (folder / STOP).exists():
            stopping = True
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
