"""Grades of a model that is told what to say."""

from collections.abc import Callable

import pytest

from artifacts import ModelBundle
from data.microworld import instructions, stories
from riftco.config import EvaluationConfig
from riftco.data import InstructionExample
from riftco.experiments import samples
from tasks.call import Work
from tasks.evaluate import answer_questions, sample_stories
from tasks.prepare import put_json, read_json
from tests.support import FIXTURES

BUNDLE = FIXTURES / "byte.rift"


def test_stories_of_the_micro_world_are_graded(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [story.text for story in stories(3, 1)]
    wrong = told[0].replace(told[0].split()[3], "Nobody", 1)
    monkeypatch.setattr(samples, "sample_documents", lambda *_: [*told, wrong])
    bundle = work.store.put_bundle(ModelBundle.load(BUNDLE))
    for origin, share in (("micro-world", 0.75), ("files", None)):
        facts = put_json(work.store, "facts", {"origin": origin})
        results = sample_stories.body(work, bundle, facts, EvaluationConfig(stories=4))
        assert read_json(work.store, results["samples"]).get("consistent") == share


@pytest.mark.parametrize(("mistaken", "accuracy"), [(lambda i: False, 1.0), (lambda i: i % 2 == 1, 0.5)])
def test_answers_are_counted_by_kind(
    work: Work, monkeypatch: pytest.MonkeyPatch, mistaken: Callable[[int], bool], accuracy: float
) -> None:
    records = instructions(48, 2)
    test = work.store.put_bytes("instructions", _jsonl(records))
    right = {record["prompt"]: record["response"] for record in records}

    def answers(bundle: ModelBundle, examples: list[InstructionExample], progress: object) -> list[str]:
        return ["wrong" if mistaken(i) else right[example.prompt] for i, example in enumerate(examples)]

    monkeypatch.setattr(samples, "answer_examples", answers)
    bundle = work.store.put_bundle(ModelBundle.load(BUNDLE))
    results = answer_questions.body(work, bundle, test, EvaluationConfig(questions=24))
    answered = read_json(work.store, results["answers"])
    assert (answered["questions"], answered["accuracy"], answered["too_long"]) == (24, accuracy, 0)
    held_out = answered["by_kind"].pop("held out")
    assert "unanswerable" in answered["by_kind"]
    # a held-out record counts in its kind as well
    assert sum(kind["questions"] for kind in answered["by_kind"].values()) == 24 > held_out["questions"] > 0


@pytest.mark.parametrize(("fitting", "accuracy"), [(1, 1.0), (0, None)])
def test_what_the_context_cannot_hold_is_counted_and_not_graded(
    work: Work, monkeypatch: pytest.MonkeyPatch, fitting: int, accuracy: float | None
) -> None:
    records = [{"prompt": f"question {i}", "response": "yes"} for i in range(3)]
    monkeypatch.setattr(samples, "answer_examples", lambda *_: ["Yes."] * fitting + [None] * (3 - fitting))
    bundle = work.store.put_bundle(ModelBundle.load(BUNDLE))
    test = work.store.put_bytes("instructions", _jsonl(records))
    results = answer_questions.body(work, bundle, test, EvaluationConfig())
    answered = read_json(work.store, results["answers"])
    assert (answered["questions"], answered["accuracy"], answered["too_long"]) == (
        fitting,
        accuracy,
        3 - fitting,
    )


def _jsonl(records: list[dict]) -> bytes:
    from artifacts import canonical_json

    return b"".join(canonical_json(record) + b"\n" for record in records)
