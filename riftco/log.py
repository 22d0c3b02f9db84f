"""The project's log: short lines for a terminal; under Prefect the UI shows the same ones."""

import logging

LOGGER = logging.getLogger("riftco")
LOGGER.setLevel(logging.INFO)  # here, so that it holds in the processes of a task runner too


def log_to_terminal() -> None:
    """Show the log on standard error, each line with the time of day. Calling it again changes nothing."""
    if any(isinstance(handler, logging.StreamHandler) for handler in LOGGER.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    LOGGER.addHandler(handler)
