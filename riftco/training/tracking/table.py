"""The metrics of a run as one Parquet file, which every data tool reads, at any time, also after a kill.

A Parquet file can be read only once its end is written, so rows cannot be appended to one that is to stay
readable. Now and then the whole file is written anew beside the old one and takes its place in one step.
That is a megabyte for ten thousand steps. Rejected: a folder of parts, each published as it fills, which
costs less to write, but leaves thousands of files to a long run and needs a reader that knows of it.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from artifacts.files import write_atomic
from riftco.log import LOGGER
from riftco.training.tracking.pace import Clock

Row = Mapping[str, str | float | None]

SCHEMA = pa.schema(
    [
        ("phase", pa.string()),
        ("step", pa.int64()),
        ("loss", pa.float64()),
        ("bits_per_byte", pa.float64()),
        ("perplexity", pa.float64()),
        ("loss_average", pa.float64()),
        ("gradient_norm", pa.float64()),
        ("clip_scale", pa.float64()),
        ("learning_rate", pa.float64()),
        ("token_count", pa.int64()),
        ("tokens_per_second", pa.float64()),
        ("matrix_fraction", pa.float64()),
        ("peak_memory_bytes", pa.int64()),
        ("elapsed_seconds", pa.float64()),
    ]
)
"""One row a metric; null is what the metric does not have or nobody measured."""

_INTERVAL = 5.0  # seconds between two writes: what a kill can cost
_SHARE = 50  # and at least this many times what the last write took: 2 % of the time at most


class MetricTable:
    """Rows in memory, and all of them in a file from time to time and at `close`.

    A disk that refuses is told in the log once and tried again at the next write: it does not end a run.
    """

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._written = SCHEMA.empty_table()
        self._rows: list[Row] = []
        self._due = 0.0
        self._behind = self._refused = False

    def add(self, row: Row) -> None:
        """Take a row, a value or null for every column; write the file if it is time to."""
        assert row.keys() == set(SCHEMA.names), f"a row has other columns: {row.keys() ^ set(SCHEMA.names)}"
        self._rows.append(row)
        self._behind = True
        if self._clock() >= self._due:
            self._write()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._behind:
            self._write()

    def _write(self) -> None:
        start = self._clock()
        new = pa.Table.from_pylist(list(self._rows), schema=SCHEMA)
        self._written = pa.concat_tables([self._written, new]).combine_chunks()
        self._rows.clear()
        buffer = pa.BufferOutputStream()
        parquet.write_table(self._written, buffer)
        try:
            write_atomic(self.path, [memoryview(buffer.getvalue())])
        except OSError as error:
            if not self._refused:
                LOGGER.warning("%s: %s; the run goes on, its table is behind", self.path, error.strerror)
            self._refused = True
        else:
            self._behind = self._refused = False
        end = self._clock()
        self._due = end + max(_INTERVAL, _SHARE * (end - start))
