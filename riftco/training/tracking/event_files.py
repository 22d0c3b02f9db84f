"""TensorBoard's event files, through tensorboardX, in the folder `tensorboard` of a run.

The library's usual writer hands events to a thread of its own over a bounded queue, and blocks for ever once
that thread has died of a full disk. Here only its codecs and its plain file writer are used.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from riftco.training.tracking.services import Record, Settings


class EventFiles:
    """One new event file; it says that all from step 0 starts anew, so a resumed run replaces its past."""

    def __init__(self, run: str, folder: Path, settings: Settings) -> None:
        logs = folder / "tensorboard"
        logs.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(logs / "events"), f".{os.getpid()}")
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        self._write(0, time.time(), summary.text("settings", f"    {json.dumps({'run': run, **settings})}"))
        self._writer.flush()

    def log(self, records: Sequence[Record]) -> None:
        """Append the records and hand them to the operating system."""
        for record in records:
            values = [Summary.Value(tag=name, simple_value=v) for name, v in record.numbers.items()]
            if values:
                self._write(record.step, record.time, Summary(value=values))
            if record.text is not None:
                indented = "\n".join(
                    f"    {line}" for line in record.text.split("\n")
                )  # verbatim, in Markdown
                self._write(record.step, record.time, summary.text("sample", indented))
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _write(self, step: int, moment: float, content: Summary) -> None:
        self._writer.write_event(Event(step=step, wall_time=moment, summary=content))
