"""Text and instructions to bundles: pretraining, full fine-tuning, and the LoRA ranks to choose from."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from artifacts import Ref, TokenizerSpec
from riftco.config import OPERATION, LossScope, PostTrainingConfig, PretrainingConfig, RankSweepConfig
from tasks.call import Results, Work
from tasks.prepare import put_json, read_json
from tasks.step import step

if TYPE_CHECKING:
    from artifacts import ModelBundle
    from riftco.data import InstructionExample
    from riftco.training import TrainingMetric
    from riftco.training.tracking import RunTracker


@step(version=5, ignore=[f"config.{name}" for name in OPERATION])
def pretrain(
    work: Work, training: Ref, validation: Ref, tokenizer: Ref, config: PretrainingConfig
) -> Results:
    """A new model of the training text, and how well it predicts the validation text."""
    from riftco.tokenizer import Tokenizer
    from riftco.training import pretrain_splits
    from riftco.training.text_batches import text_bytes

    training_text, validation_text = (work.store.read_bytes(ref).decode() for ref in (training, validation))
    spec = TokenizerSpec.from_json(read_json(work.store, tokenizer))
    with Tokenizer.from_spec(spec) as fitted, tracked(work, config) as sink:
        result = pretrain_splits(
            training_text,
            validation_text,
            config,
            tokenizer=fitted,
            metric_sink=sink,
            workspace=work.workspace,
        )
    scores = {
        "bits_per_byte": _bits_per_byte(result.bundle, validation_text, config),
        "bytes_per_token": {
            "train": text_bytes(training_text, config) / result.training_token_count,
            "validation": text_bytes(validation_text, config) / result.validation_token_count,
        },
        "parameters": sum(spec.count for spec in result.bundle.parameters),
    }
    return {
        "bundle": work.store.put_bundle(result.bundle),
        "metrics": _put_metrics(work, result.metrics),
        "scores": put_json(work.store, "scores", scores),
    }


def _bits_per_byte(bundle: "ModelBundle", text: str, config: PretrainingConfig) -> float:
    """Bits per byte of a text, as documents where the model was trained on documents."""
    from riftco import ModelRuntime
    from riftco.data import split_documents
    from riftco.training import text_bits_per_byte, validation_bits_per_byte

    sizes = {"batch_size": config.batch_size, "context_size": config.context_size}
    with ModelRuntime.open(bundle) as runtime:
        if config.sampling_strategy == "random_window":
            return text_bits_per_byte(runtime.model, runtime.tokenizer, text, **sizes)
        return validation_bits_per_byte(runtime.model, runtime.tokenizer, split_documents(text), **sizes)


@step(version=5, ignore=[f"config.{name}" for name in OPERATION])
def post_train(work: Work, base: Ref, training: Ref, validation: Ref, config: PostTrainingConfig) -> Results:
    """The base model tuned on the training instructions, and its loss on the validation instructions."""
    from riftco import training as trainers

    examples, held_out = (read_examples(work, ref) for ref in (training, validation))
    bundle = work.store.load_bundle(base)
    with tracked(work, config) as sink:
        result = trainers.post_train(
            bundle, examples, config, validation=held_out, metric_sink=sink, workspace=work.workspace
        )
    return {"bundle": work.store.put_bundle(result.bundle), "metrics": _put_metrics(work, result.metrics)}


@step(
    version=5,
    ignore=[
        "config.ranks",
        "config.training.lora.rank",
        "config.training.lora.alpha",
        *(f"config.training.{name}" for name in OPERATION),
    ],
)
def tune_rank(
    work: Work, rank: int, base: Ref, training: Ref, validation: Ref, config: RankSweepConfig
) -> Results:
    """The base model tuned through LoRA of one rank, and its loss on the validation instructions."""
    lora = config.lora(rank)
    tuning = config.training.model_copy(update={"lora": lora})
    results = post_train.body(work, base, training, validation, tuning)
    loss = instruction_loss(
        work,
        results["bundle"],
        validation,
        config.training.context_size,
        config.training.batch_size,
        config.training.loss_scope,
    )
    scores = {"rank": rank, "alpha": lora.alpha, "validation_loss": loss}
    work.log.info("rank %d: validation loss %.4f", rank, loss)
    return {**results, "scores": put_json(work.store, "scores", scores)}


@step(version=2)
def select_rank(
    work: Work,
    candidates: tuple[Ref, ...],
    scores: tuple[Ref, ...],
    base: Ref,
    validation: Ref,
    test: Ref,
    context_size: int,
    batch_size: int,
    loss_scope: LossScope,
) -> Results:
    """The candidate with the lowest validation loss, then the lowest rank.

    Only the base and the winner are scored on the test split, and only once the choice is made.
    """
    trials = [read_json(work.store, ref) for ref in scores]
    winner = min(range(len(trials)), key=lambda i: (trials[i]["validation_loss"], trials[i]["rank"]))

    def loss(bundle: Ref, split: Ref) -> float:
        return instruction_loss(work, bundle, split, context_size, batch_size, loss_scope)

    comparison = {
        "best_rank": trials[winner]["rank"],
        "trials": trials,
        "base_validation_loss": loss(base, validation),
        "base_test_loss": loss(base, test),
        "best_test_loss": loss(candidates[winner], test),
    }
    return {"bundle": candidates[winner], "comparison": put_json(work.store, "comparison", comparison)}


def instruction_loss(
    work: Work, bundle: Ref, instructions: Ref, context_size: int, batch_size: int, loss_scope: LossScope
) -> float:
    """Mean loss of a model, in nats per token, over the tokens of an instruction split that are learned."""
    from riftco import ModelRuntime
    from riftco.training import evaluate_instruction_examples

    with ModelRuntime.open(work.store.load_bundle(bundle)) as runtime:
        runtime.model.attention = "flash"  # which computes ragged batches without padding
        return evaluate_instruction_examples(
            runtime.model,
            runtime.tokenizer,
            read_examples(work, instructions),
            context_size=context_size,
            batch_size=batch_size,
            loss_scope=loss_scope,
        ).loss


def read_examples(work: Work, instructions: Ref) -> "tuple[InstructionExample, ...]":
    """The examples of a stored split."""
    from riftco.data import parse_instructions

    return parse_instructions(work.store.read_bytes(instructions), source="instructions")


@contextmanager
def tracked(work: Work, config: PretrainingConfig | PostTrainingConfig) -> "Iterator[RunTracker]":
    """A metric sink that shows a stage's training as its progress and leaves its table in the folder."""
    from riftco.training.tracking import open_tracking

    def report(done: int, total: int, numbers: Mapping[str, float]) -> None:
        work.progress(done, total, **numbers)

    with open_tracking(
        config, run=f"{work.run}-{work.folder.name}", folder=work.folder, report=report
    ) as sink:
        yield sink


def _put_metrics(work: Work, metrics: "Iterable[TrainingMetric]") -> Ref:
    from riftco.training.metrics import encode_metrics

    return work.store.put_bytes("metrics", encode_metrics(metrics))
