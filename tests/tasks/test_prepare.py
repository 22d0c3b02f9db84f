"""Splits that share nothing, whatever the source."""

import json

import pytest

from data.microworld import entropy_floor, stories
from riftco.config import CorpusConfig, InstructionsConfig
from riftco.data import split_documents
from riftco.errors import InputError
from tasks.call import Work
from tasks.prepare import fit_tokenizer, prepare_corpus, prepare_instructions, read_json, read_records


def _documents(work: Work, results: dict, name: str) -> list[str]:
    return list(split_documents(work.store.read_bytes(results[name]).decode()))


def test_micro_world_stories_are_split_and_their_floor_is_the_validation_splits(work: Work) -> None:
    config = CorpusConfig(stories=50, random_seed=3, validation_fraction=0.2)
    results = prepare_corpus.body(work, None, config)
    told = stories(50, 3, lengths=config.events)
    assert _documents(work, results, "training") == [story.text for story in told[:40]]
    assert _documents(work, results, "validation") == [story.text for story in told[40:]]
    assert read_json(work.store, results["facts"])["entropy_floor"] == entropy_floor(told[40:])


def test_a_text_is_cut_between_documents_and_what_was_trained_on_is_not_validated_on(work: Work) -> None:
    documents = [f"document number {i}" for i in range(9)] + ["document number 2 "]
    source = work.store.put_bytes("text", "\n\n".join(documents).encode())
    results = prepare_corpus.body(work, source, CorpusConfig(validation_fraction=0.3))
    assert _documents(work, results, "training") == documents[:7]
    assert _documents(work, results, "validation") == documents[7:9]
    facts = read_json(work.store, results["facts"])
    assert (facts["validation_documents_removed"], facts["entropy_floor"]) == (1, None)


@pytest.mark.parametrize("place", [0, 5, 10])
def test_one_long_document_is_trained_on_wherever_it_stands(
    work: Work, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    documents = [f"note {i}" for i in range(10)]
    documents.insert(place, "a line of the book\n" * 99 + "the end")
    source = work.store.put_bytes("text", "\n\n".join(documents).encode())
    results = prepare_corpus.body(work, source, CorpusConfig(validation_fraction=0.02))
    sides = [_documents(work, results, name) for name in ("training", "validation")]
    assert sides[0] + sides[1] == documents
    assert documents[place] in sides[0 if place < 10 else 1]  # as the last it can only be validated on
    assert ("corpus: validation has" in caplog.text) == (place == 10)


@pytest.mark.parametrize("text", ["only one document", "the same\n\nthe same"])
def test_a_text_that_cannot_be_split_is_an_input_error(work: Work, text: str) -> None:
    source = work.store.put_bytes("text", text.encode())
    with pytest.raises(InputError, match="too few"):
        prepare_corpus.body(work, source, CorpusConfig())


def test_held_out_questions_are_only_ever_tested(work: Work) -> None:
    results = prepare_instructions.body(work, None, InstructionsConfig(examples=120))
    splits = {name: read_records(work.store, ref) for name, ref in results.items()}
    assert sum(map(len, splits.values())) == 120
    assert not any(r["held_out"] for name in ("train", "validation") for r in splits[name])
    assert any(r["held_out"] for r in splits["test"])
    prompts = [{r["prompt"] for r in records} for records in splits.values()]
    assert not prompts[0] & prompts[1] | prompts[0] & prompts[2] | prompts[1] & prompts[2]


def test_records_keep_their_split_when_others_come(work: Work) -> None:
    def train(count: int) -> set[str]:
        lines = [json.dumps({"prompt": f"question\u2028 {i}", "response": "yes"}) for i in range(count)]
        source = work.store.put_bytes("instructions", "\n".join(lines).encode())
        results = prepare_instructions.body(work, source, InstructionsConfig(path="x.jsonl"))
        return {record["prompt"] for record in read_records(work.store, results["train"])}

    assert train(50) < train(80)


def test_records_that_are_rendered_alike_are_one_record(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    records = [{"prompt": f"{i}?{end}", "response": f" {i}"} for i in range(90) for end in ("", " ", "\n")]
    source = work.store.put_bytes("instructions", "".join(json.dumps(r) + "\n" for r in records).encode())
    results = prepare_instructions.body(work, source, InstructionsConfig(path="x.jsonl"))
    splits = [read_records(work.store, ref) for ref in results.values()]
    assert sorted(record["prompt"] for split in splits for record in split) == sorted(
        f"{i}?" for i in range(90)
    )
    assert "180 records say what others say and are left out" in caplog.text


def test_an_empty_split_tells_how_many_records_are_distinct_and_what_to_raise(work: Work) -> None:
    source = work.store.put_bytes("instructions", b'{"prompt": "a", "response": "b"}\n' * 5)
    message = (
        r"validation split is empty, for 1 of 5 records .* raise instructions.validation_fraction \(0.03\)"
    )
    with pytest.raises(InputError, match=message):
        prepare_instructions.body(work, source, InstructionsConfig())


@pytest.mark.parametrize(("method", "size"), [("byte", 4), ("bpe", 257)])
def test_the_tokenizer_is_fitted_on_the_text_it_is_given(work: Work, method: str, size: int) -> None:
    corpus = work.store.put_bytes("text", b"abab\ncab")
    results = fit_tokenizer.body(work, corpus, None, method, 257, 2, end_of_text=False)
    spec = read_json(work.store, results["tokenizer"])
    assert spec["method"] == method
    assert len(spec.get("byte_vocabulary", [])) or 256 + len(spec["merge_rules"]) == size
