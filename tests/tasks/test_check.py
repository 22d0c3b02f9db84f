"""What tuning would refuse is refused before pretraining, with the split and record or the setting."""

import json
from typing import Any

import pytest

from artifacts import ModelBundle, Ref
from riftco.config import LORA_TARGETS, LoraConfig, PostTrainingConfig
from riftco.errors import InputError
from tasks.call import Work
from tasks.check import check_tuning
from tasks.prepare import fit_tokenizer, read_json
from tests.support import FIXTURES

ROWS = PostTrainingConfig(sampling_strategy="document_rows")
HEAD = ROWS.model_copy(update={"fine_tuning_method": "lora", "lora": LoraConfig(targets=LORA_TARGETS)})
WINDOWS = PostTrainingConfig(context_size=64)


def _splits(work: Work, last: str = "yes") -> dict[str, Ref]:
    texts = {"train": "yes", "validation": "yes", "test": last}
    return {
        name: work.store.put_bytes(
            "instructions", json.dumps({"prompt": "Is it?", "response": text}).encode()
        )
        for name, text in texts.items()
    }


def _check(work: Work, splits: dict[str, Ref], method: str, rank: int, config: PostTrainingConfig) -> Any:
    corpus = work.store.put_bytes("text", b"it is.\n\nis it?")
    tokenizer = fit_tokenizer.body(work, corpus, splits["train"], method, 256, 2, end_of_text=False)
    facts = check_tuning.body(work, tokenizer["tokenizer"], splits, "post_training", rank, config)["facts"]
    return read_json(work.store, facts)


def test_what_fits_is_counted(work: Work) -> None:
    counts = {"train": 1, "validation": 1, "test": 1}
    assert _check(work, _splits(work), "byte", 4, HEAD) == counts
    assert _check(work, _splits(work, "é"), "bpe", 4, ROWS) == counts
    base = work.store.put_bundle(ModelBundle.load(FIXTURES / "bpe.rift"))
    facts = check_tuning.body(work, base, _splits(work), "post_training", 4, ROWS)["facts"]
    assert read_json(work.store, facts) == counts


@pytest.mark.parametrize(
    ("last", "rank", "config", "message"),
    [
        ("né", 4, ROWS, r"record 1 of the test split, 'Is it\?': byte 195 .* method 'bpe'"),
        (
            "yes",
            99,
            HEAD,
            "post_training: rank 99 exceeds the vocabulary of 1. ids, a side of language_model",
        ),
        (
            "yes",
            4,
            WINDOWS,
            "post_training: 1 of 1 examples have fewer than 65 tokens, .* smaller context_size",
        ),
    ],
)
def test_what_would_end_the_run_later_is_refused(
    work: Work, last: str, rank: int, config: PostTrainingConfig, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _check(work, _splits(work, last), "byte", rank, config)
