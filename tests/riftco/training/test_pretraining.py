"""Pretraining from text and files: the original's runs, its metadata, and what is refused."""

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from artifacts import ModelBundle, TokenizerSpec
from riftco.config import PretrainingConfig
from riftco.errors import InputError
from riftco.tokenizer import Tokenizer
from riftco.training import (
    PretrainingResult,
    TrainingMetric,
    fit_tokenizer,
    pretrain_file,
    pretrain_files,
    pretrain_splits,
    pretrain_text,
)
from tests.riftco.training.support import assert_metrics_agree
from tests.support import FIXTURES, fixture

RECORDED = fixture("training.json")
TEXT = RECORDED["byte_pretraining"]["text"]
SMALL = PretrainingConfig(
    steps=2, context_size=8, batch_size=2, tokenizer_method="byte", validation_batch_count=1
)
ROWS = SMALL.model_copy(update={"sampling_strategy": "document_rows", "tokenizer_method": "bpe"})
STORIES = "\n\n".join(
    f"{who} went to the {place}." for who in ("Ann", "Bo", "Cy") for place in ("mill", "sea", "hut")
)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def assert_run_agrees(result: PretrainingResult, case: dict[str, Any], bundle_name: str) -> None:
    assert_metrics_agree(result.metrics, case["metrics"])
    assert result.training_token_count == case["training_token_count"]
    assert result.validation_token_count == case["validation_token_count"]
    expected = ModelBundle.load(FIXTURES / bundle_name)
    assert result.bundle.metadata == case["metadata"] == expected.metadata
    assert (result.bundle.stage, result.bundle.parent_artifact_id) == ("pretraining", None)
    assert result.bundle.config == expected.config
    assert result.bundle.tokenizer == expected.tokenizer
    assert result.bundle.parameters == expected.parameters
    for name, values in expected.tensors().items():
        if not name.endswith("attention.key.bias"):
            np.testing.assert_allclose(result.bundle.tensors()[name], values, atol=1e-4, err_msg=name)


def test_the_byte_run_is_the_recorded_one() -> None:
    case = RECORDED["byte_pretraining"]
    result = pretrain_text(TEXT, PretrainingConfig.model_validate(case["config"]))
    assert_run_agrees(result, case, "byte.rift")


def test_the_bpe_run_is_the_recorded_one() -> None:
    case = RECORDED["bpe_pretraining"]
    config = PretrainingConfig.model_validate(case["config"])
    result = pretrain_splits(case["training_text"], case["validation_text"], config)
    assert_run_agrees(result, case, "bpe.rift")


def test_the_same_seed_gives_the_same_artifact() -> None:
    first, second = (pretrain_text(TEXT, SMALL) for _ in range(2))
    assert first.bundle.artifact_id == second.bundle.artifact_id
    assert first.metrics == second.metrics
    other = pretrain_text(TEXT, SMALL.model_copy(update={"random_seed": 8}))
    assert other.bundle.artifact_id != first.bundle.artifact_id


def test_a_file_is_its_text_with_universal_newlines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert pretrain_file(path, SMALL).bundle.artifact_id == pretrain_text(TEXT, SMALL).bundle.artifact_id


def test_two_files_are_two_splits(tmp_path: Path) -> None:
    training, validation = tmp_path / "training.txt", tmp_path / "validation.txt"
    training.write_text(TEXT[:900])
    validation.write_text(TEXT[900:1000])
    result = pretrain_files(training, validation, SMALL)
    assert result.bundle.artifact_id == pretrain_splits(TEXT[:900], TEXT[900:1000], SMALL).bundle.artifact_id
    assert result.bundle.metadata["applied_validation_fraction"] is None


def test_one_file_twice_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path, link = tmp_path / "training.txt", tmp_path / "link.txt"
    path.write_bytes(b"\xff")
    link.symlink_to(path)
    with pytest.raises(InputError, match=r"link\.txt: is the training file too"):
        pretrain_files(path, link, SMALL)
    with pytest.raises(InputError, match="no such file"):
        pretrain_files(path.with_name("absent"), path.with_name("absent"), SMALL)


def test_metrics_reach_the_sink() -> None:
    seen: list[TrainingMetric] = []
    result = pretrain_text(TEXT, SMALL, metric_sink=seen.append)
    assert tuple(seen) == result.metrics


def test_a_tokenizer_fitted_before_is_used_as_it_is() -> None:
    config = SMALL.model_copy(update={"tokenizer_method": "bpe"})
    tokenizer = fit_tokenizer(TEXT[:900], config)
    given = pretrain_splits(TEXT[:900], TEXT[900:], config, tokenizer=tokenizer)
    assert given.bundle.artifact_id == pretrain_splits(TEXT[:900], TEXT[900:], config).bundle.artifact_id
    with pytest.raises(InputError, match="the tokenizer given is byte but tokenizer_method is bpe"):
        pretrain_splits(TEXT[:900], TEXT[900:], config, tokenizer=Tokenizer(TEXT))


def test_a_vocabulary_too_large_for_a_bundle_is_refused_before_the_first_step() -> None:
    rules = tuple((*divmod(number, 256), 256 + number) for number in range(70_000))
    tokenizer = Tokenizer.from_spec(TokenizerSpec("bpe", merge_rules=rules))
    config = SMALL.model_copy(update={"tokenizer_method": "bpe", "model_width": 4})
    seen: list[TrainingMetric] = []
    with pytest.raises(InputError, match=r"vocabulary_size 70256 .* too large for a bundle: .* 1048576"):
        pretrain_splits(TEXT[:900], TEXT[900:], config, tokenizer=tokenizer, metric_sink=seen.append)
    assert seen == []


@pytest.mark.parametrize("block_count", [2000, 10**8])
def test_blocks_too_many_for_a_bundle_are_refused_before_the_model_is_built(
    block_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("riftco.training.pretraining.DecoderOnlyTransformer", pytest.fail)
    with pytest.raises(InputError, match=f"block_count {block_count} are too large for a bundle"):
        pretrain_text(TEXT, SMALL.model_copy(update={"block_count": block_count}))


def test_the_validation_tail_is_counted_in_characters() -> None:
    result = pretrain_text("ab" * 40 + "é" * 20, SMALL)
    assert (result.training_token_count, result.validation_token_count) == (100, 20)
    assert result.bundle.metadata["validation_text_sha256"] == sha256("é" * 10)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_that_cannot_be_split_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="leaves nothing to train on"):
        pretrain_text(text, SMALL)


def test_an_empty_or_repeated_side_is_refused() -> None:
    with pytest.raises(InputError, match="validation text is empty"):
        pretrain_splits(TEXT, "", SMALL)
    with pytest.raises(InputError, match="training text is empty"):
        pretrain_splits("", TEXT, SMALL)
    with pytest.raises(InputError, match="are the same"):
        pretrain_splits(TEXT, TEXT, SMALL)


def test_a_side_too_short_for_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match="validation text has 8 tokens and a context of 8 needs 9"):
        pretrain_splits(TEXT, TEXT[:8], SMALL)
    with pytest.raises(InputError, match="training text has 3 tokens"):
        pretrain_splits("the", TEXT, SMALL)
    assert pretrain_splits(TEXT, TEXT[:9], SMALL).validation_token_count == 9


def test_a_byte_the_vocabulary_lacks_advises_bpe() -> None:
    with pytest.raises(InputError, match=r"validation text: byte 195 .*bpe"):
        pretrain_splits(TEXT, TEXT[:50] + "é", SMALL)


def test_document_rows_train_on_documents_and_count_a_separator_each() -> None:
    training, validation = STORIES.rsplit("\n\n", 3)[0], "Di went home.\n\n\nEd went home."
    result = pretrain_splits(training, validation, ROWS)
    assert result.bundle.metadata["training_config"]["sampling_strategy"] == "document_rows"
    tokenizer = Tokenizer.from_spec(result.bundle.tokenizer)
    assert result.validation_token_count == sum(
        len(tokenizer.encode(story)) + 1 for story in ("Di went home.", "Ed went home.")
    )


def test_a_short_document_needs_no_full_context() -> None:
    config = ROWS.model_copy(update={"context_size": 64})
    assert pretrain_splits("one.\n\ntwo.", "six.", config).metrics[0].phase == "validation"


def test_document_rows_validate_the_first_documents_in_order() -> None:
    training, config = "a\n\nb\n\nc", ROWS.model_copy(update={"batch_size": 2, "steps": 1})
    few = pretrain_splits(training, "d\n\ne", config).metrics[0].loss
    many = pretrain_splits(training, "d\n\ne\n\nfg\n\nh", config).metrics[0].loss
    other = pretrain_splits(training, "fg\n\nd\n\ne", config).metrics[0].loss
    assert few == many != other


def test_a_derived_split_of_documents_cuts_between_two_of_them() -> None:
    head, tail = "one.\n\ntwo.\n\n", "the third and longest document of this text."
    result = pretrain_text(head + tail, ROWS)  # a tenth of the characters lies within the last document
    assert result.bundle.metadata["training_text_sha256"] == sha256(head)
    assert result.bundle.metadata["validation_text_sha256"] == sha256(tail)
    with pytest.raises(
        InputError, match=r"the text is one document; put blank lines .* or use .* random_window"
    ):
        pretrain_text("one document of one line", ROWS)


def test_a_long_document_stays_on_the_side_that_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    training = "note\n\n" + "a line of the book\n" * 99 + "\n"
    result = pretrain_text(training + "other note\n\nlast note", ROWS)
    assert result.bundle.metadata["training_text_sha256"] == sha256(training)
    assert "validation has 21 of 1,909 characters where validation_fraction is 0.1" in caplog.text


def test_validation_documents_among_the_training_ones_are_refused_with_a_count() -> None:
    with pytest.raises(InputError, match="2 of 3 validation documents are training documents too"):
        pretrain_splits("a\n\nb\n\nc", "c\n\nd\n\n a", ROWS)


def test_a_text_without_documents_is_refused_by_side() -> None:
    with pytest.raises(InputError, match="validation text has no documents"):
        pretrain_splits("a\n\nb", " \n\n ", ROWS)


def test_a_byte_vocabulary_without_newline_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"training text: byte 10 .*bpe"):
        pretrain_splits("abc", "cba", ROWS.model_copy(update={"tokenizer_method": "byte"}))


def test_extensions_show_in_the_metadata_only_when_used() -> None:
    plain = pretrain_text(TEXT, SMALL).bundle.metadata
    assert plain["optimizer"] == "adam"
    assert not {"optimizer", "schedule", "sampling_strategy"} & set(plain["training_config"])
    config = SMALL.model_copy(update={"optimizer": "adamw", "schedule": "cosine", "warmup_steps": 1})
    metadata = pretrain_text(TEXT, config).bundle.metadata
    assert metadata["optimizer"] == metadata["training_config"]["optimizer"] == "adamw"
    assert metadata["training_config"]["schedule"] == "cosine"


def test_warm_up_changes_the_run_from_its_first_update() -> None:
    plain = pretrain_text(TEXT, SMALL).metrics
    warmed = pretrain_text(TEXT, SMALL.model_copy(update={"warmup_steps": 2})).metrics
    assert plain[1].loss == warmed[1].loss
    assert plain[2].loss != warmed[2].loss


LEARNING = PretrainingConfig(
    steps=60,
    context_size=32,
    batch_size=9,
    vocabulary_size=270,
    model_width=32,
    feed_forward_width=64,
    learning_rate=1e-2,
    optimizer="adamw",
    schedule="cosine",
    warmup_steps=5,
    sampling_strategy="document_rows",
)


def test_adamw_with_document_rows_learns_the_stories() -> None:
    metrics = pretrain_splits(STORIES, "Di went to the sea.", LEARNING).metrics
    assert metrics[-2].loss < 0.3 < 4 < metrics[1].loss


@pytest.mark.parametrize(("precision", "first", "most"), [("bf16", 0.003, 0.03), ("int8", 0.02, 0.1)])
def test_rounded_products_learn_what_float32_does(precision: str, first: float, most: float) -> None:
    losses = []
    for kind in ("fp32", precision):
        config = LEARNING.model_copy(update={"precision": kind})
        metrics = pretrain_splits(STORIES, "Di went to the sea.", config).metrics
        losses.append(np.array([metric.loss for metric in metrics[1:-1]]))
    away = np.abs(losses[0] - losses[1])
    assert 0 < away[:5].max() < first
    assert away.max() < most


def test_training_does_not_load_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's optimiser classes import torch._dynamo when constructed: 3 CPU seconds in every process.
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # any import of it now fails
    assert pretrain_text(TEXT, SMALL.model_copy(update={"optimizer": "adamw"})).metrics


def test_the_configuration_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValidationError):
        PretrainingConfig.model_validate({"sampling_strategy": "window_uniform"})


def test_training_neither_reads_nor_moves_the_global_generators() -> None:
    ids = set()
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), torch.get_rng_state()
        for config, text in ((SMALL, TEXT), (ROWS, STORIES)):
            ids.add(pretrain_text(text, config).bundle.artifact_id)
        assert random.getstate() == before[0]
        assert torch.get_rng_state().equal(before[1])
    assert len(ids) == 2
