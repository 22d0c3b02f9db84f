"""The serving check asks the real server, and fails when it answers something else than the model."""

import pytest

from artifacts import ModelBundle
from riftco.config import ServingConfig
from riftco.serving import ModelService
from tasks.call import Work
from tasks.prepare import read_json
from tasks.serve import check_serving
from tests.support import FIXTURES

RECORDS = b'{"prompt": "Who counts?", "response": "The miller."}\n' * 3


def test_it_records_what_the_server_answers(work: Work) -> None:
    loaded = ModelBundle.load(FIXTURES / "bpe.rift")
    bundle, test = work.store.put_bundle(loaded), work.store.put_bytes("instructions", RECORDS)
    served = read_json(work.store, check_serving.body(work, bundle, test, ServingConfig())["exchanges"])
    assert served["health"]["artifact_id"] == loaded.artifact_id
    with ModelService(loaded) as service:
        prompt = served["exchanges"][0]["prompt"]
        expected = service.generate(prompt, max_new_tokens=16).raw_bytes[len(prompt.encode()) :]
    assert served["exchanges"][0]["answer"] == expected.decode(errors="replace")


def test_an_answer_that_depends_on_more_than_the_request_is_an_error(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = work.store.put_bundle(ModelBundle.load(FIXTURES / "bpe.rift"))
    test = work.store.put_bytes("instructions", RECORDS)
    generate, calls = ModelService.generate, []

    def unsteady(self: ModelService, prompt: str, **options: int) -> object:
        calls.append(prompt)
        return generate(self, prompt + "x" * (len(calls) % 2), **options)

    monkeypatch.setattr(ModelService, "generate", unsteady)
    with pytest.raises(RuntimeError, match="not the model's own"):
        check_serving.body(work, bundle, test, ServingConfig())
