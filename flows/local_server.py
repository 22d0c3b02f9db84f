"""A Prefect server for one local run: started on demand, ended with the run, nothing sent anywhere.

Prefect has no server-less mode, and its built-in ephemeral server has a 20 s start limit that a small machine
misses, outlives a killed parent and loses the last records. So `local_prefect` starts one of our own, under
the project's own PREFECT_HOME, unless PREFECT_API_URL already names a server.

Cost is the concern: nearly all of a start is importing Prefect's server and, the first time, about a hundred
database migrations. We add nothing and leave out what a server that lives for minutes cannot need: schedules,
late runs, triggers, block types, and the check of migrations (3 CPU seconds) where this version of Prefect is
known to have brought this database up to date. The socket is ours and is handed over, so the port is never
taken by somebody else and the first request is answered the moment the server is ready, without polling.
"""

import http.client
import importlib.metadata
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from riftco.errors import InputError
from riftco.exclusive import exclusive
from riftco.log import LOGGER, log_to_terminal
from riftco.sigterm import sigterm_exits

SERVER_PROCESS = Path(__file__).with_name("server_process.py")
_START_SECONDS = 180
_STOP_SECONDS = 10
_LOOPBACK = "127.0.0.1"
_NOT_NEEDED = (
    *("SCHEDULER", "LATE_RUNS", "PAUSE_EXPIRATIONS", "FOREMAN", "CANCELLATION_CLEANUP"),
    *("REPOSSESSOR", "CLEANUP_RECONCILER", "TRIGGERS"),
)
_PRIVATE = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
}
_LOGGING = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "riftco",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The terminal gets our own lines, the UI everything; a failure reaches the terminal as an exception.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


@contextmanager
def local_prefect() -> Iterator[str]:
    """Everything a flow of this process needs; yields the API's URL. Enter it once, before importing Prefect.

    With PREFECT_API_URL set that server is used; else one is started under $RIFTCO_HOME/prefect and ended at
    exit, at the latest when this process ends, killed or not. SIGTERM becomes `SystemExit(143)`, so that the
    block is left in order. Raises RuntimeError if Prefect has been imported already (it reads its settings at
    import) or if the server does not start, InputError if the named one does not answer.
    """
    if "prefect" in sys.modules:
        raise RuntimeError("enter local_prefect() before prefect, or a module with a flow, is imported")
    with ExitStack() as stack:
        stack.enter_context(sigterm_exits())
        for name, value in (_PRIVATE | _LOGGING).items():
            os.environ.setdefault(name, value)
        log_to_terminal()
        url = os.environ.get("PREFECT_API_URL")
        if url:
            _require_answer(url)
        else:
            url = _own_server(stack)
        try:
            yield url
        finally:
            send_what_is_queued()


@contextmanager
def start_server(home: Path) -> Iterator[str]:
    """A Prefect server whose database is under `home`, ready to answer; yields the API's URL."""
    with _started(home) as server:
        server.wait_until_ready()
        yield server.url


def _require_answer(url: str) -> None:
    import httpx
    from prefect import get_client

    try:
        with get_client(sync_client=True) as client:
            answer = client.request("GET", "/health")
    except httpx.HTTPStatusError as error:
        answer = error.response
    except httpx.RequestError as error:
        raise InputError(
            f"PREFECT_API_URL {url} does not answer ({error}); start it, or unset it to have a local one"
        ) from error
    if answer.text != "true" and "/api" not in urlsplit(url).path:
        raise InputError(
            f"PREFECT_API_URL {url} answers as no Prefect API does ({answer.status_code}); "
            "its address ends in /api"
        )


def _own_server(stack: ExitStack) -> str:
    home = Path(os.environ.get("RIFTCO_HOME") or ".riftco").absolute() / "prefect"
    server = stack.enter_context(_started(home))
    os.environ.update(_client_environment(home, server.url))
    stack.callback(os.environ.pop, "PREFECT_API_URL", None)
    # Seconds of import, spent while the server starts. No heartbeats: they tell a server that outlives its
    # flows which of them died, and joining their thread costs each flow run a second.
    import prefect.flow_engine  # noqa: F401
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    stack.enter_context(temporary_settings(updates={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
    server.wait_until_ready()
    LOGGER.info("Prefect shows this run at %s", server.url.removesuffix("/api"))
    return server.url


def _client_environment(home: Path, url: str) -> dict[str, str]:
    unproxied = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    unproxied = ",".join(filter(None, [unproxied, _LOOPBACK, "localhost"]))
    return {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "NO_PROXY": unproxied, "no_proxy": unproxied}


def send_what_is_queued() -> None:
    """Send log lines and events that Prefect's threads still hold; they could not be sent later."""
    from prefect.events.worker import EventsWorker

    for handler in LOGGER.handlers:
        handler.flush()
    EventsWorker.drain_all(timeout=_STOP_SECONDS)


@dataclass
class _Server:
    """A server that has been started, and perhaps does not answer yet."""

    home: Path
    port: int
    process: subprocess.Popen[bytes]
    migration: ExitStack
    """Holds the migration lock, if this start has to migrate the database."""

    @property
    def url(self) -> str:
        return _url(self.port)

    def wait_until_ready(self) -> None:
        """Return when the server answers; RuntimeError with the end of its log if it does not."""
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=_START_SECONDS)
        try:
            connection.request("GET", "/api/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            log = self.home / "server.log"
            last = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(
                f"the local Prefect server did not start ({error!r}); if its database is broken, delete "
                f"{self.home}, which only holds the history of runs. The end of {log}:\n{last}"
            ) from error
        finally:
            connection.close()
        _note_migrated(self.home)
        self.migration.close()


@contextmanager
def _started(home: Path) -> Iterator[_Server]:
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as migration:
        if not _is_migrated(home):
            message = "another process is setting up the Prefect database; waiting"
            migration.enter_context(exclusive(home / "migration.lock", lambda: LOGGER.info(message)))
        with socket.create_server((_LOOPBACK, 0)) as listener, (home / "server.log").open("ab") as log:
            port = listener.getsockname()[1]
            process = subprocess.Popen(
                [sys.executable, "-P", SERVER_PROCESS, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                cwd=home,
                env=_server_environment(home, port),
                start_new_session=True,  # Ctrl-C is for the run; the server ends after it
            )
        try:
            yield _Server(home, port, process, migration)
        finally:
            _end(process)


def _url(port: int) -> str:
    return f"http://{_LOOPBACK}:{port}/api"


def _server_environment(home: Path, port: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    services = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _NOT_NEEDED}
    own = {
        "PREFECT_HOME": str(home),
        "PREFECT_UI_API_URL": _url(port),
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
        "PREFECT_API_DATABASE_MIGRATE_ON_START": str(not _is_migrated(home)),
    }
    return inherited | _PRIVATE | services | own


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _is_migrated(home: Path) -> bool:
    """Whether this version of Prefect was seen to bring the database to the revision that it has now."""
    try:
        return (home / "migrated").read_text(encoding="utf-8") == _schema(home)
    except (OSError, sqlite3.Error):
        return False


def _note_migrated(home: Path) -> None:
    (home / "migrated").write_text(_schema(home), encoding="utf-8")


def _schema(home: Path) -> str:
    connection = sqlite3.connect(f"{(home / 'prefect.db').as_uri()}?mode=ro", uri=True)
    try:
        (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    finally:
        connection.close()
    return f"prefect {importlib.metadata.version('prefect')}, revision {revision}"
