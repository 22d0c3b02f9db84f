"""Raw data to splits: the corpus, the instructions, and the tokenizer that is fitted on the training text."""

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from artifacts import Ref, Store, canonical_json
from data.microworld import entropy_floor, instructions, stories
from riftco.chat_template import ASCII_WHITESPACE
from riftco.config import CorpusConfig, InstructionsConfig, PretrainingConfig
from riftco.errors import InputError
from tasks.call import Results, Work
from tasks.step import step


@step(version=3, ignore=("config.path",))
def prepare_corpus(work: Work, source: Ref | None, config: CorpusConfig) -> Results:
    """Training and validation text that share no document, and facts about them.

    Without a source the documents are micro-world stories, whose entropy is known.
    """
    from riftco.data.text import share_warning, split_documents

    floor: float | None = None
    if source is None:
        told = list(
            {
                story.text: story
                for story in stories(config.stories, config.random_seed, lengths=config.events)
            }.values()
        )
        cut = len(told) - max(1, round(len(told) * config.validation_fraction))
        floor = entropy_floor(told[cut:])
        training, validation = [s.text for s in told[:cut]], [s.text for s in told[cut:]]
    else:
        documents = list(split_documents(work.store.read_bytes(source).decode()))
        cut = _documents_before(documents, 1 - config.validation_fraction)
        training, validation = documents[:cut], documents[cut:]
    known = {document.strip() for document in training}
    distinct = [document for document in validation if document.strip() not in known]
    if not training or not distinct:
        raise InputError(
            f"corpus: {len(training)} training and {len(distinct)} validation documents are too few; "
            "give more text, in paragraphs with a blank line between them"
        )
    if source is not None:
        sizes = [sum(map(len, side)) for side in (training, validation)]
        if warning := share_warning(sizes[1], sum(sizes), config.validation_fraction):
            work.log.warning("corpus: %s", warning)
    facts = {
        "origin": "micro-world" if source is None else "files",
        "entropy_floor": floor,
        "training_documents": len(training),
        "validation_documents": len(distinct),
        "validation_documents_removed": len(validation) - len(distinct),
    }
    for side, members in (("training", training), ("validation", distinct)):
        work.log.info(f"corpus: {len(members):,} {side} documents, {sum(map(len, members)):,} characters")
    return {
        "training": work.store.put_bytes("text", _joined(training)),
        "validation": work.store.put_bytes("text", _joined(distinct)),
        "facts": put_json(work.store, "facts", facts),
    }


@step(version=4, ignore=("config.path",))
def prepare_instructions(work: Work, source: Ref | None, config: InstructionsConfig) -> Results:
    """Training, validation and test records, each once, assigned by a stable hash of what they say.

    What counts is the prompt and the response as they are rendered, without outer white space. Micro-world
    questions about name and place pairs that no story tells are all in the test split.
    """
    from riftco.data import SplitFractions, StableHashSplitter, parse_instructions

    if source is None:
        records = instructions(config.examples, config.random_seed)
    else:
        examples = parse_instructions(work.store.read_bytes(source), source=config.path or "instructions")
        records = [example.identity for example in examples]
    fractions = SplitFractions(config.train_fraction, config.validation_fraction, config.test_fraction)
    splits = StableHashSplitter(fractions, config.split_seed).partition(
        [record for record in records if not record.get("held_out")],
        identity=lambda record: {
            name: record[name].strip(ASCII_WHITESPACE) for name in ("prompt", "response")
        },
    )
    splits["test"] += tuple(record for record in records if record.get("held_out"))
    counts = {name: len(members) for name, members in splits.items()}
    for name, count in counts.items():
        if not count:
            raise InputError(
                f"instructions: the {name} split is empty, for {sum(counts.values())} of {len(records)} "
                f"records are distinct; give more, or raise instructions.{name}_fraction "
                f"({getattr(config, f'{name}_fraction')}) and lower another"
            )
    work.log.info("instructions: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))
    if repeated := len(records) - sum(counts.values()):
        work.log.info("instructions: %d records say what others say and are left out", repeated)
    return {name: work.store.put_bytes("instructions", _jsonl(members)) for name, members in splits.items()}


@step(version=2)
def fit_tokenizer(
    work: Work,
    corpus: Ref,
    instructions: Ref | None,
    method: str,
    vocabulary_size: int,
    minimum_pair_frequency: int,
    end_of_text: bool,
) -> Results:
    """The tokenizer of the training text, and of the training instructions as they will be rendered.

    Whoever is going to be tuned on instructions then has tokens for their template and their questions. The
    other arguments are those of the settings that the tokenizer depends on.
    """
    from riftco import training
    from riftco.data import PlainChatFormatter, parse_instructions

    config = PretrainingConfig.model_validate(
        {
            "tokenizer_method": method,
            "vocabulary_size": vocabulary_size,
            "minimum_pair_frequency": minimum_pair_frequency,
            "end_of_text": end_of_text,
            "sampling_strategy": "document_rows",  # any that has documents to end
        }
    )
    text = work.store.read_bytes(corpus).decode()
    if instructions is not None:
        examples = parse_instructions(work.store.read_bytes(instructions), source="instructions")
        text += "".join(map(PlainChatFormatter().format, examples))
    with training.fit_tokenizer(text, config) as tokenizer:
        work.log.info("tokenizer: %s with %d entries", method, tokenizer.vocab_size)
        return {"tokenizer": put_json(work.store, "tokenizer", tokenizer.spec.to_json())}


def put_json(store: Store, kind: str, value: Any) -> Ref:
    """Store a JSON value in its canonical form."""
    return store.put_bytes(kind, canonical_json(value))


def read_json(store: Store, ref: Ref) -> Any:
    """A stored JSON value."""
    return json.loads(store.read_bytes(ref))


def read_records(store: Store, ref: Ref) -> list[dict[str, Any]]:
    """The records of a stored instruction split."""
    return [json.loads(line) for line in store.read_bytes(ref).split(b"\n") if line]


def _documents_before(documents: list[str], share: float) -> int:
    """How many documents from the start come nearest to this share of all characters, one left at least."""
    ends = list(accumulate(map(len, documents)))
    return min(range(1, len(ends)), key=lambda count: abs(ends[count - 1] - share * ends[-1]), default=0)


def _joined(documents: Iterable[str]) -> bytes:
    return "".join(f"{document}\n\n" for document in documents).encode()


def _jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(canonical_json(dict(record)) + b"\n" for record in records)
