"""`riftco bench-serve` as it is called: what it prints, how it ends."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from riftco.bench_cli import bench_serve
from tests.riftco.bench_serve.fake_server import FakeServer, serving, two_tokens
from tests.support import FIXTURES

app = typer.Typer()
app.command()(bench_serve)
_IDS = {"vocabulary_size": 50}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_sweep_prints_a_column_for_each_level_and_draws_a_figure(tmp_path: Path) -> None:
    with serving(FakeServer(two_tokens, health=_IDS)) as fake:
        picture = tmp_path / "load.png"
        result = run(fake.url, "-c", "1,2", "-n", "4", "--prompt-tokens", "8", "--png", str(picture))
    assert result.exit_code == 0, result.output
    lines = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines()}
    assert lines["requests in flight"][-2:] == ["1", "2"]
    assert lines["answered"][-2:] == ["4/4", "4/4"]
    assert lines["of these cached"][-4:] == ["50", "%", "50", "%"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_says_what_was_asked_and_found() -> None:
    with serving(FakeServer(two_tokens, health=_IDS)) as fake:
        result = run(fake.url, "-c", "3", "-n", "5", "--shared", "0.5", "--new-tokens", "2", "--json")
    found = json.loads(result.stdout)
    assert found["load"]["shared"] == 0.5
    assert [(one["concurrency"], one["requests"], one["new_tokens"]) for one in found["levels"]] == [
        (3, 5, 10)
    ]


def test_failures_are_told_and_make_the_exit_code_1() -> None:
    calls = iter(range(100))

    def fail_later(body: dict[str, Any]) -> Any:
        return two_tokens(body) if next(calls) < 2 else (503, "text/plain", iter([b"full"]))

    with serving(FakeServer(fail_later, health=_IDS)) as fake:
        result = run(fake.url, "-c", "1", "-n", "3")
    assert result.exit_code == 1
    assert "2 failed: HTTP 503: full" in result.stderr


def test_verify_finds_answers_that_depend_on_the_load() -> None:
    seen: dict[str, int] = {}

    def other_the_second_time(body: dict[str, Any]) -> Any:
        prompt = str(body["prompt"])
        seen[prompt] = seen.get(prompt, 0) + 1
        status, kind, pieces = two_tokens(body)
        changed = (piece.replace(b'"b"', b'"c"') if seen[prompt] == 2 else piece for piece in pieces)
        return status, kind, changed

    for answer, exit_code in ((two_tokens, 0), (other_the_second_time, 1)):
        with serving(FakeServer(answer, health=_IDS)) as fake:
            result = run(fake.url, "-c", "1,2", "-n", "3", "--verify", "--json")
        assert result.exit_code == exit_code
        assert [one["differing"] for one in json.loads(result.stdout)["levels"]] == [0, 3 * exit_code]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:9", "-c", "0,2"], "--concurrency 0,2"),
        (["http://127.0.0.1:9", "-c", "x"], "--concurrency x"),
        (["http://127.0.0.1:9", "-c", "1,9", "-n", "8"], "give at least 9"),
        (["http://127.0.0.1:9", "-c", "4", "--verify"], "at least two"),
        (["http://127.0.0.1:9", "--png", "/not/there/load.png"], "/not/there/load.png"),
        (["http://127.0.0.1:99999"], "ort"),
        (["http://127.0.0.1:9", "-s", "mode=fast"], "--set is for a server"),
        (["http://127.0.0.1:9"], "is a server running there"),
    ],
)
def test_what_the_user_can_mend_is_one_line(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_shows_what_there_is() -> None:
    calls, waits, ending = iter(range(100)), threading.Event(), threading.Event()

    def stall_after_three(body: dict[str, Any]) -> Any:
        if next(calls) == 4:
            waits.set()
            ending.wait(60)
        return two_tokens(body)

    # A shell's background job, as the tests may be one, is started with Ctrl-C ignored.
    code = (
        "import signal, typer; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from riftco.bench_cli import bench_serve; typer.run(bench_serve)"
    )
    with serving(FakeServer(stall_after_three, health=_IDS)) as fake:
        command = [sys.executable, "-c", code, fake.url, "-c", "1", "-n", "9"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert waits.wait(60)
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
            finally:
                process.kill()
                ending.set()
    assert process.returncode == 130, errors
    assert "3/9" in output
    assert "interrupted" in errors


def test_a_model_is_served_for_the_length_of_the_benchmark() -> None:
    load = ("-c", "1,4", "-n", "6", "--prompt-tokens", "8", "--new-tokens", "3")
    result = run(str(FIXTURES / "byte.rift"), *load, "--verify", "--json")
    assert result.exit_code == 0, result.output
    levels = json.loads(result.stdout)["levels"]
    assert [one["requests"] for one in levels] == [6, 6]
    assert [one["new_tokens"] for one in levels] == [18, 18]


def test_no_server_is_left_behind_by_a_benchmark_that_is_told_to_end() -> None:
    code = """
import sys, time
from riftco.bench_serve.own_server import own_server
with own_server(sys.argv[1]) as url:
    print(url, flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(FIXTURES / "byte.rift")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().strip())
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    with socket.socket() as probe:
        assert probe.connect_ex((url.hostname, url.port)) != 0


def test_a_model_that_is_not_there_ends_with_a_line() -> None:
    result = run("absent.rift")
    assert result.exit_code == 2
    assert "absent.rift: its server ended with exit code 2" in result.stderr
