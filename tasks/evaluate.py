"""What the models can do: stories sampled and graded, questions answered and graded."""

from collections.abc import Sequence
from random import Random
from typing import Any

from artifacts import Ref
from data.grading import grade_answer, grade_story
from riftco.config import EvaluationConfig
from tasks.call import Results, Work
from tasks.prepare import put_json, read_json, read_records
from tasks.step import step


@step(version=5, ignore=("config.questions",))
def sample_stories(work: Work, bundle: Ref, corpus_facts: Ref, config: EvaluationConfig) -> Results:
    """Stories the model tells; of the micro-world, with the share that contradicts nothing it said."""
    from riftco.experiments.samples import sample_documents

    model = work.store.load_bundle(bundle)
    stories = sample_documents(model, config.stories, config.random_seed, work.progress)
    samples: dict[str, Any] = {"stories": stories}
    if read_json(work.store, corpus_facts)["origin"] == "micro-world":
        verdicts = [grade_story(story.replace("\n", " ")) for story in stories]  # one line, all of it graded
        samples["reasons"] = [verdict.reason for verdict in verdicts]
        for aspect in ("consistent", "person", "object", "place"):
            samples[aspect] = sum(getattr(verdict, aspect) for verdict in verdicts) / len(verdicts)
        work.log.info("stories: %.0f %% of %d are consistent", 100 * samples["consistent"], len(stories))
    return {"samples": put_json(work.store, "samples", samples)}


@step(version=3, ignore=("config.stories",))
def answer_questions(work: Work, bundle: Ref, test: Ref, config: EvaluationConfig) -> Results:
    """The model's answers to a sample of the test split, and the share that is right.

    Records that are longer than the model's context cannot be answered; they are counted and left out.
    """
    from riftco.data import InstructionExample
    from riftco.experiments.samples import answer_examples

    records = read_records(work.store, test)
    records = Random(config.random_seed).sample(records, min(config.questions, len(records)))
    examples = [InstructionExample(record["prompt"], record["response"]) for record in records]
    answers = answer_examples(work.store.load_bundle(bundle), examples, work.progress)
    answered = [(r, text) for r, text in zip(records, answers, strict=True) if text is not None]
    right = [grade_answer(record["response"], text) for record, text in answered]
    by_kind: dict[str, list[bool]] = {}
    for (record, _), is_right in zip(answered, right, strict=True):
        for kind in (record.get("kind"), "held out" if record.get("held_out") else None):
            if kind:
                by_kind.setdefault(kind, []).append(is_right)
    scores = {
        **_score(right),
        "too_long": len(records) - len(answered),
        "by_kind": {kind: _score(marks) for kind, marks in sorted(by_kind.items())},
        "examples": [
            {"prompt": record["prompt"], "expected": record["response"], "answer": text}
            for record, text in answered[:3]
        ],
    }
    work.log.info("questions: %d of %d answered right", sum(right), len(right))
    if scores["too_long"]:
        work.log.warning(
            "questions: %d are longer than the context with their answer, and left out; raise context_size",
            scores["too_long"],
        )
    return {"answers": put_json(work.store, "answers", scores)}


def _score(marks: Sequence[bool]) -> dict[str, Any]:
    """How many questions were graded, and the share that is right; None of no questions."""
    return {"questions": len(marks), "accuracy": sum(marks) / len(marks) if marks else None}
