"""Pretraining: from text to the bundle of a new model that predicts its next token.

The tokenizer is fitted on the training text alone, so nothing of the validation text reaches the model.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from artifacts import ModelBundle, ModelConfig, Workspace
from riftco.backends import resolve_backend
from riftco.config import PretrainingConfig, contract_dump
from riftco.data import read_text
from riftco.data.text import document_cut, share_warning, shown
from riftco.errors import InputError
from riftco.log import LOGGER
from riftco.model import DecoderOnlyTransformer
from riftco.runtime import capture_bundle, require_bundle_fits
from riftco.tokenizer import Tokenizer
from riftco.training.loop import MetricSink, TrainingMetric
from riftco.training.ranks import is_leader, trains_here
from riftco.training.run import run_training
from riftco.training.text_batches import TextBatches, text_batches, text_bytes
from riftco.training.tracking import beginning

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class PretrainingResult:
    """The trained bundle, every metric in order, and how many tokens there were on either side."""

    bundle: ModelBundle
    metrics: tuple[TrainingMetric, ...]
    training_token_count: int
    validation_token_count: int


@dataclass(frozen=True, slots=True)
class Texts:
    """What to learn, what to be judged by, and whether the one was cut off the other."""

    training: str
    validation: str
    source: Literal["derived_fraction", "explicit"]


def pretrain_text(
    text: str,
    config: PretrainingConfig | None = None,
    *,
    metric_sink: MetricSink | None = None,
    workspace: Workspace | None = None,
) -> PretrainingResult:
    """Pretrain on the head of a text and validate on its tail, `validation_fraction` of its characters.

    With `document_rows` and `packed` the cut moves to the nearest start of a document. InputError when a side
    is empty, too short for the context, or not in the tokenizer's vocabulary.
    """
    config = config or PretrainingConfig()
    return pretrain_texts(_derived_split(text, config), config, metric_sink=metric_sink, workspace=workspace)


def pretrain_file(
    path: PathLike,
    config: PretrainingConfig | None = None,
    *,
    metric_sink: MetricSink | None = None,
    workspace: Workspace | None = None,
) -> PretrainingResult:
    """`pretrain_text` on the text of a file, read as `riftco.data.read_text` does."""
    return pretrain_text(read_text(path), config, metric_sink=metric_sink, workspace=workspace)


def pretrain_splits(
    training_text: str,
    validation_text: str,
    config: PretrainingConfig | None = None,
    *,
    metric_sink: MetricSink | None = None,
    workspace: Workspace | None = None,
    tokenizer: Tokenizer | None = None,
) -> PretrainingResult:
    """Pretrain on one text and validate on another; `validation_fraction` plays no part.

    `tokenizer` is one of the configured method fitted before on this training text. InputError as
    `pretrain_text`, and when both texts are the same.
    """
    for name, text in (("training", training_text), ("validation", validation_text)):
        if not text:
            raise InputError(f"the {name} text is empty; give some text")
    if training_text == validation_text:
        raise InputError("the training and validation texts are the same; hold back text for validation")
    texts = Texts(training_text, validation_text, "explicit")
    config = config or PretrainingConfig()
    return pretrain_texts(texts, config, metric_sink=metric_sink, workspace=workspace, tokenizer=tokenizer)


def pretrain_files(
    training_path: PathLike,
    validation_path: PathLike,
    config: PretrainingConfig | None = None,
    *,
    metric_sink: MetricSink | None = None,
    workspace: Workspace | None = None,
) -> PretrainingResult:
    """`pretrain_splits` on the texts of two files; InputError if they are one and the same."""
    if _same_file(training_path, validation_path):
        raise InputError(f"{shown(validation_path)}: is the training file too; give another for validation")
    training, validation = read_text(training_path), read_text(validation_path)
    return pretrain_splits(training, validation, config, metric_sink=metric_sink, workspace=workspace)


def fit_tokenizer(training_text: str, config: PretrainingConfig) -> Tokenizer:
    """The configured tokenizer, fitted on the training text."""
    if config.tokenizer_method == "byte":
        return Tokenizer(training_text, method="byte", end_of_text=config.end_of_text)
    if config.end_of_text and config.vocabulary_size == 256:
        raise InputError("vocabulary_size 256 leaves no id for end_of_text; use at least 257")
    if is_leader():
        LOGGER.info(
            f"fitting a tokenizer of {config.vocabulary_size:,} ids on {len(training_text):,} characters"
        )
    return Tokenizer(
        training_text,
        method="bpe",
        vocabulary_size=config.vocabulary_size,
        minimum_pair_frequency=config.minimum_pair_frequency,
        end_of_text=config.end_of_text,
    )


def pretrain_texts(
    texts: Texts,
    config: PretrainingConfig,
    *,
    metric_sink: MetricSink | None,
    workspace: Workspace | None,
    tokenizer: Tokenizer | None = None,
) -> PretrainingResult:
    """What all of the above come to; in `config.processes` ranks, which are launched unless this is one."""
    backend = resolve_backend(config.backend)
    if not trains_here(config, backend):
        from riftco.training.jobs import pretrain_in_ranks

        return pretrain_in_ranks(texts, config, tokenizer, metric_sink=metric_sink, workspace=workspace)
    tokenizer = tokenizer or fit_tokenizer(texts.training, config)
    if tokenizer.method != config.tokenizer_method:
        raise InputError(
            f"the tokenizer given is {tokenizer.method} but tokenizer_method is {config.tokenizer_method}; "
            "make them agree"
        )
    if config.end_of_text != (tokenizer.end_of_text_id is not None):
        has = "no" if config.end_of_text else "an"
        raise InputError(
            f"the tokenizer given has {has} end-of-text token but end_of_text is {config.end_of_text}; "
            "make them agree"
        )
    batches = text_batches(texts.training, texts.validation, tokenizer, config)
    model_config = _model_config(tokenizer, config)
    metadata = _metadata(texts, batches, config, backend)
    require_bundle_fits(model_config, tokenizer, stage="pretraining", metadata=metadata)
    model = DecoderOnlyTransformer(model_config).move_to(backend)
    bytes_per_token = text_bytes(texts.training, config) / batches.training_token_count
    metrics = run_training(
        model,
        model.base_parameters(),
        batches.source,
        config,
        inputs={"validation": metadata["validation_text_sha256"]},
        validation_batches=batches.validation,
        metric_sink=metric_sink,
        begin=beginning(metric_sink, model, tokenizer, config, bytes_per_token=bytes_per_token),
        workspace=workspace,
    )
    bundle = capture_bundle(model, tokenizer, stage="pretraining", metadata=metadata)
    return PretrainingResult(bundle, metrics, batches.training_token_count, batches.validation_token_count)


def _metadata(texts: Texts, batches: TextBatches, config: PretrainingConfig, backend: str) -> dict[str, Any]:
    derived = texts.source == "derived_fraction"
    return {
        "objective": "next_token_prediction",
        "training_token_count": batches.training_token_count,
        "validation_token_count": batches.validation_token_count,
        "tokenizer_fit_scope": "training_split_only",
        "validation_source": texts.source,
        "training_text_sha256": _sha256(texts.training),
        "validation_text_sha256": _sha256(texts.validation),
        "applied_validation_fraction": config.validation_fraction if derived else None,
        "training_config": contract_dump(config),
        "resolved_backend": backend,
        "optimizer": config.optimizer,
        "optimizer_state_included": False,
    }


def _model_config(tokenizer: Tokenizer, config: PretrainingConfig) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=tokenizer.vocab_size,
        maximum_context=config.context_size,
        model_width=config.model_width,
        head_count=config.head_count,
        block_count=config.block_count,
        feed_forward_width=config.feed_forward_width,
        random_seed=config.random_seed,
    )


def _derived_split(text: str, config: PretrainingConfig) -> Texts:
    cut = len(text) - max(1, math.ceil(len(text) * config.validation_fraction))
    if config.sampling_strategy != "random_window":
        cut = document_cut(text, cut)
        if not cut:
            raise InputError(
                "the text is one document; put blank lines between documents, or use sampling_strategy "
                "random_window"
            )
        warning = share_warning(len(text) - cut, len(text), config.validation_fraction)
        if warning and is_leader():
            LOGGER.warning(warning)
    if cut <= 0:
        raise InputError(
            f"a text of {len(text)} characters leaves nothing to train on beside a validation share of "
            f"{config.validation_fraction}; give more text or a smaller validation_fraction"
        )
    return Texts(text[:cut], text[cut:], "derived_fraction")


def _same_file(left: PathLike, right: PathLike) -> bool:
    """Whether both paths lead to one file; a path that leads nowhere is the reader's to report."""
    return Path(left).exists() and Path(right).exists() and Path(left).samefile(right)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
