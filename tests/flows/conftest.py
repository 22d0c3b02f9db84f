"""One Prefect server for all tests that need it, started when the first of them asks."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.local_server import send_what_is_queued, start_server


@pytest.fixture(scope="session")
def riftco_home(request: pytest.FixtureRequest) -> Path:
    """Kept between sessions, so that the database is migrated only once; `pytest --cache-clear` drops it."""
    return request.config.cache.mkdir("riftco-home")


@pytest.fixture(scope="session")
def prefect_api(riftco_home: Path) -> Iterator[str]:
    """URL of a running server, which this process's Prefect uses too; its database is in `riftco_home`."""
    home = riftco_home / "prefect"
    with start_server(home) as url:
        os.environ.setdefault("PREFECT_HOME", str(home))  # before the import: never read the user's profiles
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            PREFECT_LOGGING_TO_API_ENABLED,
            temporary_settings,
        )

        settings = {
            PREFECT_API_URL: url,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
            PREFECT_LOGGING_TO_API_ENABLED: False,
        }
        with temporary_settings(updates=settings), pytest.MonkeyPatch.context() as patch:
            for module in ("websockets.client", "websockets.asyncio.connection"):
                # An open connection draws from the global generator, which checkpoints hold, every 20 s.
                patch.setattr(f"{module}.random", random.Random())
            yield url
            send_what_is_queued()
