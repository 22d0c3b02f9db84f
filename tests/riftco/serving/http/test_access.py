"""API keys: the file, who is let in where, and how much each key may ask for."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count as count_from
from pathlib import Path

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.http.access import OPEN_PATHS, Access, ApiKey, new_key
from riftco.serving.http.request_policy import RefusedError, RequestHead
from tests.riftco.serving.http.support import any_text_bundle, get, held_engine
from tests.riftco.serving.http.wire import connect, exchange, post, read_answer, read_stream

DIGEST = "ab" * 32


def with_key(request: bytes, key: str) -> bytes:
    """A request with an Authorization header."""
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)


def head(authorization: str | None, path: str = "/v1/models") -> RequestHead:
    headers = () if authorization is None else (("authorization", authorization),)
    return RequestHead("GET", path, headers)


def test_a_made_key_lets_its_owner_in(tmp_path: Path) -> None:
    (alice, alices_line), (bob, bobs_line) = new_key("alice"), new_key("bob")
    assert alice not in alices_line
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{alices_line}\n  {bobs_line}  concurrent=2 per_minute=60\n")
    access = Access.from_file(file)
    found = [access.key_of(head(f"Bearer {key}")) for key in (alice, bob)]
    assert [(key.name, key.concurrent, key.per_minute) for key in found if key] == [
        ("alice", None, None),
        ("bob", 2, 60),
    ]
    assert found[0].salt != found[1].salt  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no keys"),
        ("# nobody", "has no keys"),
        ("alice", ":1: expected NAME:SHA256"),
        ("alice:" + "AB" * 32, ":1: expected NAME:SHA256"),
        (f"al ice:{DIGEST}", ":1: expected NAME:SHA256"),
        (f"alice:{DIGEST} concurrent", ":1: expected NAME:SHA256"),
        (f"alice:{DIGEST} concurrent=0", "concurrent of key 'alice' must be at least 1"),
        (f"alice:{DIGEST} per_hour=9", ":1: unknown limit 'per_hour'"),
        (f"alice:{DIGEST}\nalice:{DIGEST}", "key 'alice' is given twice"),
    ],
)
def test_a_key_file_that_is_wrong_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(ValueError, match=message):
        Access.from_file(file)


def test_a_name_that_the_file_could_not_hold_gets_no_key() -> None:
    with pytest.raises(ValueError, match="name: expected NAME"):
        new_key("two words")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic right",
        "right",
        "Bearer right x",
        "Bearer r\xffght",
    ],
)
def test_everybody_else_is_told_so(authorization: str | None) -> None:
    access = Access([ApiKey("only", hashlib.sha256(b"right").digest())])
    with pytest.raises(RefusedError) as error:
        access.key_of(head(authorization))
    assert error.value.refusal.status == 401
    assert access.key_of(head("bearer right")) is access.keys[0]


def test_without_keys_everybody_is_let_in() -> None:
    access = Access()
    assert access.key_of(head("Bearer whatever")) is None
    with access.admitted(None), access.admitted(None):
        pass


def test_a_key_runs_as_many_requests_as_it_may() -> None:
    access = Access([ApiKey("one", b"1", concurrent=2), ApiKey("other", b"2")])
    one, other = access.keys
    with ExitStack() as running:
        for key in (one, one, other, other, other):
            running.enter_context(access.admitted(key))
        with pytest.raises(RefusedError, match="2 requests running") as error, access.admitted(one):
            pass
        assert error.value.refusal.retry_after == 1
    with access.admitted(one):
        pass


def test_a_minute_s_requests_come_back_evenly() -> None:
    now = 100.0
    access = Access([ApiKey("one", b"1", per_minute=6)], clock=lambda: now)
    (key,) = access.keys
    waits: list[int | None] = []

    def admitted() -> int:
        for count in count_from(0):
            try:
                with access.admitted(key):
                    pass
            except RefusedError as error:
                waits.append(error.refusal.retry_after)
                return count
        raise AssertionError

    assert admitted() == 6
    for seconds, count in [(9, 0), (1, 1), (25, 2), (5, 1), (1_000, 6)]:
        now += seconds
        assert admitted() == count
    assert waits == [10, 1, 10, 5, 10, 10]


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(), ServingConfig(backend="cpu")) as service:
        yield service


def test_only_the_page_and_the_probes_are_open(service: ModelService) -> None:
    key, line = new_key("alice")
    access = Access([ApiKey("alice", bytes.fromhex(line.split(":")[1]))])
    with background_server(service, access=access) as url:
        assert exchange(url, get("/health")).json["keys"] is True
        for path in OPEN_PATHS:
            assert exchange(url, get(path)).status == 200
        closed = [get("/metrics"), get("/openapi.json"), get("/v1/models"), get("/v1/models/riftco")]
        generations = [
            post({"prompt": "a", "max_new_tokens": 1}),
            post({"model": "riftco", "prompt": "a"}, "/v1/completions"),
            post(
                {"model": "riftco", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
                "/v1/chat/completions",
            ),
        ]
        for request in closed + generations:
            refused = exchange(url, request)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert exchange(url, with_key(request, "riftco-wrong")).status == 401
            assert exchange(url, with_key(request, key)).status == 200
        openai_error = exchange(url, generations[1]).json["error"]
        assert (openai_error["type"], openai_error["code"]) == ("authentication_error", "invalid_api_key")
    with background_server(service) as url:
        assert exchange(url, get("/health")).json["keys"] is False


def test_a_key_at_its_limits_is_a_429_and_others_are_served(service: ModelService) -> None:
    (first, second), lines = zip(*(new_key(name) for name in ("first", "second")), strict=True)
    digests = [bytes.fromhex(line.split(":")[1]) for line in lines]
    access = Access([ApiKey("first", digests[0], concurrent=1), ApiKey("second", digests[1])])
    request = post({"prompt": "a", "max_new_tokens": 1})
    with background_server(service, access=access) as url:
        with held_engine(service) as hold, connect(url) as busy, busy.makefile("rb") as stream:
            busy.sendall(with_key(request, first))
            assert hold.reached.wait(10)
            refused = exchange(url, with_key(request, first))
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            hold.end.set()
            assert read_answer(stream).status == 200
        assert exchange(url, with_key(request, second)).status == 200
        assert exchange(url, with_key(request, first)).status == 200


def test_a_client_may_ask_again_as_soon_as_it_has_the_whole_answer(service: ModelService) -> None:
    key, line = new_key("one")
    access = Access([ApiKey("one", bytes.fromhex(line.split(":")[1]), concurrent=1)])
    with background_server(service, access=access) as url, connect(url) as connection:
        stream = connection.makefile("rb")
        for _ in range(100):
            connection.sendall(with_key(post({"prompt": "a", "max_new_tokens": 1}), key))
            assert read_answer(stream).status == 200
        for _ in range(100):
            connection.sendall(with_key(post({"prompt": "a", "max_new_tokens": 1, "stream": True}), key))
            assert read_stream(stream)[-1]["finish_reason"] == "length"
            assert stream.readline() == b"\r\n"


def test_a_key_file_is_read_again_when_it_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (alice, alices_line), (bob, bobs_line) = new_key("alice"), new_key("bob")
    file = tmp_path / "keys"
    file.write_text(f"{alices_line}\n")
    access = Access.from_file(file)

    def let_in() -> list[bool]:
        found = []
        for key in (alice, bob):
            try:
                found.append(access.key_of(head(f"Bearer {key}")) is not None)
            except RefusedError:
                found.append(False)
        return found

    assert let_in() == [True, False]
    file.write_text(f"{alices_line} per_minute=1\n{bobs_line} concurrent=1\n")
    assert let_in() == [True, True]
    with access.admitted(access.keys[0]):  # the first of a minute
        pass
    with access.admitted(access.keys[1]), pytest.raises(RefusedError), access.admitted(access.keys[1]):
        pass
    file.write_text(f"{bobs_line}\n")
    assert let_in() == [False, True]
    file.write_text("nonsense\n")
    assert let_in() == [False, True]
    file.unlink()
    assert let_in() == [False, True]
    assert [record.getMessage()[:32] for record in caplog.records] == ["the API keys stay as they were: "] * 2
    file.write_text("# nobody\n")
    assert let_in() == [False, False]


def test_keys_never_share_cached_pages(service: ModelService) -> None:
    keys, lines = zip(*(new_key(name) for name in ("first", "second")), strict=True)
    access = Access([ApiKey(line.split(":")[0], bytes.fromhex(line.split(":")[1])) for line in lines])
    body = {"model": "riftco", "prompt": "What the one says the other must not time" * 2, "max_tokens": 1}
    with background_server(service, access=access) as url:
        cached = [
            exchange(url, with_key(post(body, "/v1/completions"), key)).json["usage"]["prompt_tokens_details"]
            for key in (keys[0], keys[0], keys[1], keys[1])
        ]
    assert [one["cached_tokens"] > 0 for one in cached] == [False, True, False, True]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
@pytest.mark.parametrize("access", [None, Access()])
def test_an_address_open_to_others_needs_keys(
    service: ModelService, host: str, access: Access | None
) -> None:
    with (
        pytest.raises(ValueError, match="no API keys; make one with"),
        background_server(service, host=host, access=access),
    ):
        pass
