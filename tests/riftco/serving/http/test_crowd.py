"""The server in a crowd: every answer right, nothing left behind, health at once."""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from tests.riftco.serving.http.support import any_text_bundle, figures, get, held_engine
from tests.riftco.serving.http.wire import exchange, post, wait_until

CONFIG = ServingConfig(backend="cpu", maximum_running=8, maximum_waiting=256, stall_seconds=1.5)
KINDS = 20


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(64), CONFIG) as service:
        yield service


def start(url: str, task: str, work: dict[str, Any]) -> subprocess.Popen:
    script = Path(__file__).with_name("crowd.py")
    process = subprocess.Popen(
        [sys.executable, "-I", str(script), url, task],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(work))
    process.stdin.close()
    return process


def result(process: subprocess.Popen) -> Any:
    with process:
        assert process.stdout is not None
        return json.loads(process.stdout.read())


def cases(service: ModelService, count: int, leavers: int, longest: int = 12) -> list[dict[str, Any]]:
    """Requests with what the model answers to each when it is asked alone."""
    rng = random.Random(7)
    kinds = []
    for number in range(KINDS):
        fields: dict[str, Any] = {
            "prompt": "In common, " * rng.randint(0, 3) + f"and {number}",
            "max_new_tokens": rng.randint(1, longest),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": number,
        }
        answer = service.generate(**fields)
        expected = answer.raw_bytes[len(fields["prompt"].encode()) :].decode(errors="replace")
        kinds.append((fields, expected))
    found = []
    for number in range(count):
        fields, expected = kinds[number % KINDS]
        body = fields | {"stream": number % 2 == 0}
        found.append({"body": body, "expected": expected, "leaves": number < leavers})
    rng.shuffle(found)
    return found


def server_tasks() -> int:
    """Tasks of the server's event loop."""
    loops = [one for one in gc.get_objects() if issubclass(type(one), asyncio.BaseEventLoop)]
    return sum(len(asyncio.all_tasks(loop)) for loop in loops if loop.is_running())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("count", "leavers"), [(150, 15), pytest.param(1_000, 100, marks=pytest.mark.soak)])
def test_a_hundred_clients_at_once_get_their_own_answers_and_leave_nothing(
    service: ModelService, count: int, leavers: int
) -> None:
    work = {"cases": cases(service, count, leavers), "concurrency": 100, "seed": 1}
    with background_server(service) as url:
        exchange(url, post({"prompt": "a", "max_new_tokens": 1}))
        before = server_tasks(), descriptors()
        total = sum(service.engine.stats().requests_finished.values())
        answers = result(start(url, "ask", work))
        assert answers == {"right": count - leavers, "left": leavers}
        assert wait_until(lambda: (server_tasks(), descriptors()) <= before)
        stats = service.engine.stats()
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
        assert stats.violations == 0
        ended = sum(stats.requests_finished.values()) - total
        assert count - leavers <= ended <= count
        assert figures(url)["num_requests_running"] == 0
        assert exchange(url, get("/ready")).status == 200


def test_an_engine_that_hangs_is_reported_and_then_recovers(service: ModelService) -> None:
    assert ServingConfig().stall_seconds <= 4, "with its default it is reported within 5 s"
    work = {"cases": cases(service, 4, 0), "concurrency": 4, "seed": 1}
    with background_server(service) as url:
        with held_engine(service) as hold:
            waiting = start(url, "ask", work)
            assert hold.reached.wait(10)
            assert wait_until(lambda: exchange(url, get("/health")).status == 503)
            assert exchange(url, get("/health")).json["status"] == "stalled"
            unready = exchange(url, get("/ready"))
            assert (unready.status, unready.json["detail"]) == (503, "the engine is stalled")
        assert result(waiting) == {"right": 4}
        assert wait_until(lambda: exchange(url, get("/health")).status == 200)
        assert exchange(url, get("/ready")).status == 200


def test_an_engine_that_ended_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelService(any_text_bundle(64), CONFIG) as service, background_server(service) as url:
        monkeypatch.setattr(service.engine, "_end_late", None)  # what it calls in each turn
        assert wait_until(lambda: exchange(url, get("/health")).json["status"] == "stopped")
        assert exchange(url, get("/health")).status == exchange(url, get("/ready")).status == 503
        refused = exchange(url, post({"prompt": "a"}))
        assert (refused.status, refused.json["error"]) == (503, "Service Unavailable")


def test_a_full_queue_is_not_ready(service: ModelService, monkeypatch: pytest.MonkeyPatch) -> None:
    with background_server(service) as url:
        stats = service.engine.stats()
        full = replace(stats, running=CONFIG.maximum_running, waiting=CONFIG.maximum_waiting)
        monkeypatch.setattr(service.engine, "stats", lambda: full)
        unready = exchange(url, get("/ready"))
        assert (unready.status, unready.json["detail"]) == (503, "the queue is full")
        monkeypatch.undo()
        assert exchange(url, get("/ready")).status == 200


SERVE = """
import sys
from riftco.config import ServingConfig
from riftco.serving import serve
config = ServingConfig.model_validate_json(sys.argv[2])
serve(sys.argv[1], config=config, port=0, ready=lambda url: print(url, flush=True))
"""


def resident_mib(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.soak
def test_a_hundred_thousand_requests_do_not_make_the_server_grow(
    service: ModelService, tmp_path: Path
) -> None:
    rounds, each = 10, 10_000
    any_text_bundle(64).save(tmp_path / "model.rift")
    command = [sys.executable, "-c", SERVE, str(tmp_path / "model.rift"), CONFIG.model_dump_json()]
    sizes, begin = [], time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        for number in range(rounds):
            work = {"cases": cases(service, each, each // 10), "concurrency": 100, "seed": number}
            assert result(start(url, "ask", work)) == {"right": each - each // 10, "left": each // 10}
            assert wait_until(lambda: figures(url)["num_requests_running"] == 0)
            sizes.append(resident_mib(server.pid))
            print(f"{(number + 1) * each} requests, {time.monotonic() - begin:.0f} s: {sizes[-1]:.1f} MiB")
        server.terminate()
        assert server.wait(30) == 0
    growth = np.polyfit(range(1, rounds), sizes[1:], 1)[0]  # of 10,000 requests, from the second on
    assert growth < 1, sizes
    assert time.monotonic() - begin < 1_800


@pytest.mark.soak
def test_health_answers_within_a_tenth_of_a_second_under_saturation() -> None:
    with ModelService(any_text_bundle(256), CONFIG) as service, background_server(service) as url:
        work = {"cases": cases(service, 3_000, 300, longest=120), "concurrency": 100, "seed": 2}
        crowd = start(url, "ask", work)
        assert wait_until(lambda: figures(url)["num_requests_waiting"] > 50)
        seconds = sorted(result(start(url, "probe", {"count": 500, "pause": 0.01})))
        assert crowd.poll() is None, "the crowd must outlast the probe"
        with crowd:
            crowd.kill()
    assert seconds[int(0.99 * len(seconds))] <= 0.1, seconds[:: len(seconds) // 20]
