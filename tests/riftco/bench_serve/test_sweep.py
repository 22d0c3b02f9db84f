"""The load: requests in flight, what a failure or an interruption leaves, what is asked first."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from riftco.bench_serve.load import Load, id_prompts
from riftco.bench_serve.sweep import Level, Server, sweep
from riftco.errors import InputError
from tests.riftco.bench_serve.fake_server import (
    DONE,
    STREAM,
    FakeServer,
    answers,
    chunk,
    serving,
    two_tokens,
    usage,
)


def measured(
    fake: FakeServer, load: Load, concurrencies: Sequence[int] = (1,), **more: Any
) -> tuple[list[Level], list[int]]:
    levels: list[Level] = []
    seen: list[int] = []
    with serving(fake):
        server = Server(fake.url, **more)
        asyncio.run(
            sweep(server, load, concurrencies, levels, lambda level: seen.append(len(level.outcomes)))
        )
    return levels, seen


def test_each_level_keeps_its_number_of_requests_in_flight() -> None:
    arrived = threading.Semaphore(0)

    def wait_for_company(body: dict[str, Any]) -> Any:
        """Answers only when three are here: fewer in flight would never end."""
        if body["prompt"] != first:
            arrived.release()
            together.wait(30)
        return two_tokens(body)

    fake = FakeServer(wait_for_company, health={"vocabulary_size": 50})
    load = Load(requests=6, prompt_tokens=4, new_tokens=2)
    first, together = id_prompts(load, 50)(-1, 0), threading.Barrier(3)
    (level,), seen = measured(fake, load, [3])
    assert fake.most_in_flight == 3
    assert seen == [1, 2, 3, 4, 5, 6]
    assert sorted(level.outcomes) == list(range(6))
    assert all(o.error is None and o.new_tokens == 2 for o in level.outcomes.values())
    assert level.seconds > 0
    assert level.client_seconds > 0


def test_levels_follow_each_other_and_the_first_request_is_not_counted() -> None:
    fake = FakeServer(two_tokens, health={"vocabulary_size": 50})
    levels, _ = measured(fake, Load(requests=2), [1, 2])
    assert [(level.concurrency, len(level.outcomes)) for level in levels] == [(1, 2), (2, 2)]
    assert len(fake.bodies) == 1 + 2 + 2


def test_ids_go_to_a_server_that_tells_its_vocabulary() -> None:
    fake = FakeServer(two_tokens, health={"vocabulary_size": 50}, models=("a", "b"))
    measured(fake, Load(requests=1, prompt_tokens=9), api_key="secret")
    assert all(len(body["prompt"]) == 9 and max(body["prompt"]) < 50 for body in fake.bodies)
    assert {body["model"] for body in fake.bodies} == {"a"}
    assert set(fake.keys) == {"Bearer secret"}


def test_words_go_to_a_model_whose_vocabulary_is_not_the_one_that_is_told() -> None:
    health = {"vocabulary_size": 50, "models": ["a", "b"]}
    for model, kind in (("a", list), ("b", str)):
        fake = FakeServer(two_tokens, health=health, models=("a", "b"))
        measured(fake, Load(requests=1, prompt_tokens=9), model=model)
        assert {type(body["prompt"]) for body in fake.bodies} == {kind}


def test_elsewhere_words_as_many_as_the_first_answer_says() -> None:
    def three_tokens_a_word(body: dict[str, Any]) -> Any:
        return 200, STREAM, iter([chunk("a"), usage(3 * len(body["prompt"].split()), 1), DONE])

    fake = FakeServer(three_tokens_a_word)
    (level,), _ = measured(fake, Load(requests=2, prompt_tokens=90), model="chosen")
    assert [len(body["prompt"].split()) for body in fake.bodies[1:]] == [30, 30]
    assert [outcome.prompt_tokens for outcome in level.outcomes.values()] == [90, 90]
    assert fake.bodies[0]["model"] == "chosen"
    assert fake.keys[0] is None


def test_a_failed_request_does_not_stop_the_others() -> None:
    calls = iter(range(100))

    def every_other(body: dict[str, Any]) -> Any:
        return two_tokens(body) if next(calls) % 2 == 0 else (500, "text/plain", iter([b"no"]))

    (level,), _ = measured(FakeServer(every_other, health={"vocabulary_size": 5}), Load(requests=4))
    assert [o.error is None for _, o in sorted(level.outcomes.items())] == [False, True, False, True]
    assert (level.failed, level.new_tokens) == (2, 4)


@pytest.mark.parametrize("path", ["http://{}", "http://{}/", "http://{}/v1"])
def test_the_url_may_be_given_as_other_clients_take_it(path: str) -> None:
    with serving(FakeServer(two_tokens)) as fake:
        levels: list[Level] = []
        url = path.format(fake.url.removeprefix("http://"))
        asyncio.run(sweep(Server(url), Load(requests=1), [1], levels, lambda _: None))
    assert levels[0].outcomes[0].error is None


def test_a_server_that_refuses_the_first_request_is_not_asked_again() -> None:
    fake = FakeServer(lambda _: (401, "application/json", iter([b'{"error": {"message": "no key"}}'])))
    with pytest.raises(InputError, match="first request failed: HTTP 401: no key"):
        measured(fake, Load())
    assert len(fake.bodies) == 1


def test_a_server_that_is_not_there_is_an_input_error() -> None:
    with serving(FakeServer(answers())) as fake:
        pass
    with pytest.raises(InputError, match="is a server running there"):
        asyncio.run(sweep(Server(fake.url), Load(), [1], [], lambda _: None))


def test_without_a_model_list_a_name_is_needed() -> None:
    with pytest.raises(InputError, match="--model"):
        measured(FakeServer(answers(), models=()), Load())


def test_an_interruption_leaves_what_was_answered() -> None:
    async def interrupted(levels: list[Level]) -> None:
        task = asyncio.current_task()
        assert task is not None

        def progress(level: Level) -> None:
            if len(level.outcomes) == 2:
                task.cancel()

        await sweep(Server(fake.url), Load(requests=5), [1], levels, progress)

    levels: list[Level] = []
    with serving(FakeServer(two_tokens)) as fake, pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted(levels))
    assert len(levels[0].outcomes) == 2
    assert levels[0].seconds > 0
    assert levels[0].client_seconds > 0
