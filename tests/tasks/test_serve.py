"""The serving check asks the real server, and fails when an answer depends on more than its request."""

import json
from itertools import count

import pytest

from riftco.chat_template import PLAIN, ChatMessage
from riftco.config import ServingConfig
from riftco.errors import InputError
from riftco.serving import ModelService
from riftco.serving.engine import ModelRunner
from riftco.serving.engine.request import Drawn
from tasks.call import Work
from tasks.prepare import read_json
from tasks.serve import NEW_TOKENS, check_serving
from tests.riftco.serving.http.support import any_text_bundle

RECORDS = b'{"prompt": "hi", "response": "The miller."}\n' * 2 + b'{"prompt": "%s", "response": "No."}\n'


def test_it_records_what_the_server_answers_and_how_soon(work: Work) -> None:
    loaded = any_text_bundle(context=200)
    test = work.store.put_bytes("instructions", RECORDS % (b"long " * 200))
    results = check_serving.body(work, work.store.put_bundle(loaded), test, ServingConfig(backend="cpu"))
    again = check_serving.body(work, work.store.put_bundle(loaded), test, ServingConfig(backend="cpu"))
    assert again == results, "a result that depends on the time would differ whenever the step is forced"
    served = read_json(work.store, results["exchanges"])
    assert served["health"]["artifact_id"] == loaded.artifact_id
    prompt = PLAIN.render([ChatMessage("user", "hi")])
    with ModelService(loaded) as service:
        expected = service.generate(prompt, max_new_tokens=NEW_TOKENS).raw_bytes[len(prompt.encode()) :]
    first, second, long = served["exchanges"]
    assert first == second == {"prompt": "hi", "asked": "hi", "answer": expected.decode(errors="replace")}
    assert long["prompt"] == "long " * 200
    assert ("long " * 200).startswith(long["asked"])
    assert 50 < len(long["asked"]) < 100  # cut, so that half of the context is left
    latency = json.loads((work.folder / "latency.json").read_text())
    assert [len(latency[name]) for name in ("alone", "again", "together")] == [3, 3, 3]
    assert all(0 < a["first_token_seconds"] <= a["seconds"] for a in latency["together"])


def test_an_answer_that_depends_on_more_than_the_request_is_an_error(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = work.store.put_bytes("instructions", RECORDS[: RECORDS.index(b"\n") + 1])
    run, calls = ModelRunner.run, count()

    def unsteady(self: ModelRunner, plan: object) -> list[Drawn]:
        return [Drawn((one.token_id + next(calls)) % 256) for one in run(self, plan)]  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "run", unsteady)
    with pytest.raises(RuntimeError, match="answers to 'hi' differ"):
        check_serving.body(
            work, work.store.put_bundle(any_text_bundle(context=200)), test, ServingConfig(backend="cpu")
        )


def test_a_context_without_room_for_an_answer_is_an_input_error(work: Work) -> None:
    bundle = work.store.put_bundle(any_text_bundle(context=24))
    test = work.store.put_bytes("instructions", RECORDS)
    with pytest.raises(InputError, match="context of 24 tokens has no room"):
        check_serving.body(work, bundle, test, ServingConfig(backend="cpu"))
