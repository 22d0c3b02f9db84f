"""What the models can do: stories sampled and graded, questions answered and graded."""

from random import Random
from typing import Any

from artifacts import Ref
from data.grading import grade_answer, grade_story
from riftco.config import EvaluationConfig
from tasks.call import Results, Work
from tasks.prepare import put_json, read_json, read_records
from tasks.step import step


@step(version=3, ignore=("config.questions",))
def sample_stories(work: Work, bundle: Ref, corpus_facts: Ref, config: EvaluationConfig) -> Results:
    """Stories the model tells; of the micro-world, with the share that contradicts nothing it said."""
    from riftco.experiments.samples import sample_lines

    stories = sample_lines(work.store.load_bundle(bundle), config.stories, config.random_seed, work.progress)
    samples: dict[str, Any] = {"stories": stories}
    if read_json(work.store, corpus_facts)["origin"] == "micro-world":
        verdicts = [grade_story(story) for story in stories]
        samples["reasons"] = [verdict.reason for verdict in verdicts]
        for aspect in ("consistent", "person", "object", "place"):
            samples[aspect] = sum(getattr(verdict, aspect) for verdict in verdicts) / len(verdicts)
        work.log.info("stories: %.0f %% of %d are consistent", 100 * samples["consistent"], len(stories))
    return {"samples": put_json(work.store, "samples", samples)}


@step(version=2, ignore=("config.stories",))
def answer_questions(work: Work, bundle: Ref, test: Ref, config: EvaluationConfig) -> Results:
    """The model's answers to a sample of the test split, and the share that is right."""
    from riftco.experiments.samples import answer_prompts

    records = read_records(work.store, test)
    records = Random(config.random_seed).sample(records, min(config.questions, len(records)))
    answers = answer_prompts(work.store.load_bundle(bundle), [r["prompt"] for r in records], work.progress)
    right = [grade_answer(record["response"], text) for record, text in zip(records, answers, strict=True)]
    by_kind: dict[str, list[bool]] = {}
    for record, is_right in zip(records, right, strict=True):
        if kind := "held out" if record.get("held_out") else record.get("kind"):
            by_kind.setdefault(kind, []).append(is_right)
    accuracy = sum(right) / len(right)
    work.log.info("questions: %.0f %% of %d answered right", 100 * accuracy, len(right))
    answered = {
        "questions": len(right),
        "accuracy": accuracy,
        "accuracy_by_kind": {kind: sum(marks) / len(marks) for kind, marks in sorted(by_kind.items())},
        "examples": [
            {"prompt": r["prompt"], "expected": r["response"], "answer": a}
            for r, a in list(zip(records, answers, strict=True))[:3]
        ],
    }
    return {"answers": put_json(work.store, "answers", answered)}
