"""The project's log: short lines for a terminal; under Prefect the UI shows the same ones."""

import logging
import sys

LOGGER = logging.getLogger("riftco")
LOGGER.setLevel(logging.INFO)  # here, so that it holds in the processes of a task runner too


class TerminalHandler(logging.Handler):
    """Writes to whatever standard error is at the moment of each line."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def log_to_terminal() -> None:
    """Show the log on standard error, each line with the time of day. Calling it again changes nothing."""
    if any(isinstance(handler, TerminalHandler) for handler in LOGGER.handlers):
        return
    handler = TerminalHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    LOGGER.addHandler(handler)
