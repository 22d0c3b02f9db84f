"""A server of our own for the length of a benchmark, in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from riftco.errors import InputError
from riftco.sigterm import sigterm_exits

_COMMAND = [sys.executable, "-c", "from riftco.cli import app; app()"]
_SECONDS_TO_STOP = 30


@contextmanager
def own_server(model: str, assignments: Sequence[str] = ()) -> Iterator[str]:
    """Serve a model (a file or a name in the store) on a free port; the block gets the URL.

    `assignments` are settings as `riftco serve --set` takes them. InputError if the server does not come up;
    what it had to say is on standard error.
    """
    settings = [part for assignment in assignments for part in ("--set", assignment)]
    command = [*_COMMAND, "serve", model, "--port", "0", *settings]
    with (
        sigterm_exits(),
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            found = next(filter(None, map(re.compile(r"http://\S+").search, process.stdout)), None)
            if found is None:
                raise InputError(f"{model}: its server ended with exit code {process.wait()}")
            yield found.group()
        finally:
            _stop(process)


def _stop(process: "subprocess.Popen[str]") -> None:
    """Let it finish what it is doing, but not for ever."""
    process.terminate()
    try:
        process.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
