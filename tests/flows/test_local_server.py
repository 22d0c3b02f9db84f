"""The server of a local run: there when the flow needs it, keeping the records, and gone afterwards."""

import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from artifacts import Store
from flows import local_server
from flows.local_server import local_prefect, start_server

ROOT = Path(__file__).parents[2]
SECONDS = 120


@contextmanager
def child_process(*arguments: object, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """Python in a process of its own, killed at the end if it still runs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def toy_run(*arguments: object, **environment: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """The toy flow in a process of its own."""
    return child_process("-m", "tests.flows.toy_run", *arguments, **environment)


def children(pid: int) -> list[int]:
    """Process ids of the servers a process has started."""
    output = subprocess.run(
        ["ps", "-ww", "--ppid", str(pid), "-o", "pid=,args="],  # -ww: not cut to the width of a terminal
        capture_output=True,
        text=True,
    ).stdout
    return [int(line.split()[0]) for line in output.splitlines() if "server_process.py" in line]


def first_child(pid: int) -> int:
    deadline = time.monotonic() + SECONDS
    while not children(pid):
        assert time.monotonic() < deadline, "no server was started"
        time.sleep(0.02)
    return children(pid)[0]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def api(url: str, method: str, path: str, body: Any = None) -> Any:
    """The parsed answer of Prefect's API; ConnectionRefusedError where no server listens."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, f"/api{path}", json.dumps(body) if body is not None else None, headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def task_runs(url: str, flow_run_id: str) -> list[str]:
    """Names and states of a flow run's task runs, sorted."""
    found = api(url, "POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
    return sorted(f"{task_run['name']} {task_run['state']['name']}" for task_run in found)


def test_a_local_run_brings_its_server_and_leaves_its_records(
    prefect_api: str, riftco_home: Path, tmp_path: Path
) -> None:
    """The server of the run shares the database with the tests' own server, which then reads the records."""
    with toy_run(tmp_path / "store", uuid.uuid4().hex, RIFTCO_HOME=str(riftco_home)) as process:
        url = process.stdout.readline().strip()
        server = first_child(process.pid)
        output, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, log
    assert url != prefect_api
    assert not is_running(server)
    with pytest.raises(ConnectionRefusedError):
        api(url, "GET", "/health")
    flow_run_id, digest = output.split()
    assert Store.open(tmp_path / "store").resolve("toy/join-texts").digest == digest

    assert api(prefect_api, "GET", f"/flow_runs/{flow_run_id}")["state"]["name"] == "Completed"
    assert task_runs(prefect_api, flow_run_id) == [
        "join-texts toy Completed",
        "repeat-text 2 toy Completed",
        "repeat-text 3 toy Completed",
        "write-text toy Completed",
    ]
    kept = api(prefect_api, "POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run_id]}}})
    lines = [line["message"] for line in kept if line["name"] == "riftco"]
    assert sorted(line.split(":")[0] for line in lines) == [
        "join-texts",
        "repeat-text 2",
        "repeat-text 3",
        "write-text",
    ]
    address, *terminal = [line[9:] for line in log.splitlines()]  # without the time of day
    assert address == f"Prefect shows this run at {url.removesuffix('/api')}"
    assert sorted(terminal) == sorted(lines), "the terminal shows the lines of the steps and no others"


HOLDER = """
import sys, time
from pathlib import Path
from flows.local_server import start_server
with start_server(Path(sys.argv[1])) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def test_the_server_dies_with_a_killed_process(prefect_api: str, riftco_home: Path) -> None:
    with child_process("-c", HOLDER, riftco_home / "prefect") as process:
        url = process.stdout.readline().strip()
        server = first_child(process.pid)
        assert api(url, "GET", "/health") is True
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        assert ends(server, seconds=15)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_server_dies_with_a_run_that_is_stopped_while_it_starts(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    with toy_run(tmp_path / "store", "text", RIFTCO_HOME=str(tmp_path / "home")) as process:
        server = first_child(process.pid)
        process.send_signal(sent)
        process.communicate(timeout=SECONDS)
        assert process.returncode == code
        assert ends(server, seconds=15)


def test_a_given_server_is_used(prefect_api: str, tmp_path: Path) -> None:
    with toy_run(
        tmp_path / "store", "text", RIFTCO_HOME=str(tmp_path / "home"), PREFECT_API_URL=prefect_api
    ) as process:
        assert process.stdout.readline().strip() == prefect_api
        assert children(process.pid) == []
        output, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, log
    assert not (tmp_path / "home").exists()
    flow_run_id, _ = output.split()
    assert len(task_runs(prefect_api, flow_run_id)) == 4


def test_a_given_server_that_is_down_is_one_line_with_its_address(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/api"
    command = ("-c", "from flows.cli import main; main()", "run", "pretrain")
    with child_process(*command, RIFTCO_HOME=str(tmp_path), PREFECT_API_URL=url) as process:
        output, log = process.communicate(timeout=SECONDS)
    assert (process.returncode, output, log.count("\n")) == (2, "", 1), log
    assert f"PREFECT_API_URL {url} does not answer" in log
    assert "start it, or unset it" in log


def test_an_address_that_lacks_api_is_told(prefect_api: str, tmp_path: Path) -> None:
    url = prefect_api.removesuffix("/api")
    with toy_run(tmp_path / "store", "text", RIFTCO_HOME=str(tmp_path), PREFECT_API_URL=url) as process:
        _, log = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert f"PREFECT_API_URL {url} answers as no Prefect API does (404); its address ends in /api" in log


def test_the_server_sends_nothing_anywhere(prefect_api: str) -> None:
    settings = api(prefect_api, "GET", "/admin/settings")["server"]
    assert settings["analytics_enabled"] is False
    services = {name: service["enabled"] for name, service in settings["services"].items()}
    assert services["task_run_recorder"] is True
    assert services["scheduler"] is services["triggers"] is False


def test_prefect_must_not_be_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect", sys)
    with pytest.raises(RuntimeError, match="before prefect"), local_prefect():
        pass


def test_a_server_that_does_not_start_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "server_process.py"
    script.write_text("import sys; sys.exit('no such table')")
    monkeypatch.setattr(local_server, "SERVER_PROCESS", script)
    started = start_server(tmp_path / "home")
    with pytest.raises(RuntimeError, match=r"(?s)did not start.*delete.*home.*no such table"), started:
        pass
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["server.log"]


def make_database(home: Path, revision: str) -> None:
    home.mkdir(exist_ok=True)
    connection = sqlite3.connect(home / "prefect.db")
    connection.executescript(
        f"DROP TABLE IF EXISTS alembic_version; CREATE TABLE alembic_version (version_num);"
        f"INSERT INTO alembic_version VALUES ('{revision}')"
    )
    connection.close()


def test_migrations_are_skipped_only_for_the_database_and_version_that_had_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    assert not local_server._is_migrated(home)
    make_database(home, "abc")
    assert not local_server._is_migrated(home)
    local_server._note_migrated(home)
    assert local_server._is_migrated(home)
    make_database(home, "abd")
    assert not local_server._is_migrated(home)
    make_database(home, "abc")
    assert local_server._is_migrated(home)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    assert not local_server._is_migrated(home)
    monkeypatch.undo()
    (home / "prefect.db").unlink()
    assert not local_server._is_migrated(home)


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_a_proxy_is_not_asked_for_the_local_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for other in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "intranet")
    environment = local_server._client_environment(tmp_path, "http://127.0.0.1:1/api")
    assert environment["NO_PROXY"] == environment["no_proxy"] == "intranet,127.0.0.1,localhost"
