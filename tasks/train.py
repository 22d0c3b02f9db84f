"""Text and instructions to bundles: pretraining, full fine-tuning, and the LoRA ranks to choose from."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from artifacts import Ref, TokenizerSpec, canonical_json
from riftco.config import PostTrainingConfig, PretrainingConfig, RankSweepConfig
from tasks.call import Results, Work
from tasks.prepare import put_json, read_json
from tasks.step import step

if TYPE_CHECKING:
    from riftco.data import InstructionExample
    from riftco.training import TrainingMetric


@step(version=1)
def pretrain(
    work: Work, training: Ref, validation: Ref, tokenizer: Ref, config: PretrainingConfig
) -> Results:
    """A new model of the training text, and how well it predicts the validation text."""
    from riftco import ModelRuntime
    from riftco.data import split_documents
    from riftco.tokenizer import Tokenizer
    from riftco.training import pretrain_splits, validation_bits_per_byte

    training_text, validation_text = (work.store.read_bytes(ref).decode() for ref in (training, validation))
    spec = TokenizerSpec.from_json(read_json(work.store, tokenizer))
    with Tokenizer.from_spec(spec) as fitted:
        result = pretrain_splits(
            training_text, validation_text, config, tokenizer=fitted, metric_sink=_shown(work, config.steps)
        )
    with ModelRuntime.open(result.bundle) as runtime:
        bits_per_byte = validation_bits_per_byte(
            runtime.model,
            runtime.tokenizer,
            split_documents(validation_text),
            batch_size=config.batch_size,
            context_size=config.context_size,
        )
    scores = {
        "bits_per_byte": bits_per_byte,
        "bytes_per_token": len(training_text.encode()) / result.training_token_count,
        "parameters": sum(spec.count for spec in result.bundle.parameters),
    }
    return {
        "bundle": work.store.put_bundle(result.bundle),
        "metrics": _put_metrics(work, result.metrics),
        "scores": put_json(work.store, "scores", scores),
    }


@step(version=1)
def post_train(work: Work, base: Ref, training: Ref, config: PostTrainingConfig) -> Results:
    """The base model tuned on the training instructions."""
    from riftco import training as trainers

    examples = read_examples(work, training)
    result = trainers.post_train(
        work.store.load_bundle(base), examples, config, metric_sink=_shown(work, config.steps)
    )
    return {"bundle": work.store.put_bundle(result.bundle), "metrics": _put_metrics(work, result.metrics)}


@step(version=1, ignore=("config.ranks", "config.training.lora.rank", "config.training.lora.alpha"))
def tune_rank(
    work: Work, rank: int, base: Ref, training: Ref, validation: Ref, config: RankSweepConfig
) -> Results:
    """The base model tuned through LoRA of one rank, and its loss on the validation instructions."""
    alpha = config.alpha_over_rank * rank
    lora = config.training.lora.model_copy(update={"rank": rank, "alpha": alpha})
    results = post_train.body(work, base, training, config.training.model_copy(update={"lora": lora}))
    batches = config.training.context_size, config.training.batch_size
    loss = instruction_loss(work, results["bundle"], validation, *batches)
    scores = {"rank": rank, "alpha": alpha, "validation_loss": loss}
    work.log.info("rank %d: validation loss %.4f", rank, loss)
    return {**results, "scores": put_json(work.store, "scores", scores)}


@step(version=1)
def select_rank(
    work: Work,
    candidates: tuple[Ref, ...],
    scores: tuple[Ref, ...],
    base: Ref,
    validation: Ref,
    test: Ref,
    context_size: int,
    batch_size: int,
) -> Results:
    """The candidate with the lowest validation loss, then the lowest rank.

    Only the base and the winner are scored on the test split, and only once the choice is made.
    """
    trials = [read_json(work.store, ref) for ref in scores]
    winner = min(range(len(trials)), key=lambda i: (trials[i]["validation_loss"], trials[i]["rank"]))
    comparison = {
        "best_rank": trials[winner]["rank"],
        "trials": trials,
        "base_validation_loss": instruction_loss(work, base, validation, context_size, batch_size),
        "base_test_loss": instruction_loss(work, base, test, context_size, batch_size),
        "best_test_loss": instruction_loss(work, candidates[winner], test, context_size, batch_size),
    }
    return {"bundle": candidates[winner], "comparison": put_json(work.store, "comparison", comparison)}


def instruction_loss(work: Work, bundle: Ref, instructions: Ref, context_size: int, batch_size: int) -> float:
    """Mean loss, in nats per token, of a model on every token of an instruction split."""
    from riftco import ModelRuntime
    from riftco.training import evaluate_instruction_examples

    with ModelRuntime.open(work.store.load_bundle(bundle)) as runtime:
        return evaluate_instruction_examples(
            runtime.model,
            runtime.tokenizer,
            read_examples(work, instructions),
            context_size=context_size,
            batch_size=batch_size,
        ).loss


def read_examples(work: Work, instructions: Ref) -> "tuple[InstructionExample, ...]":
    """The examples of a stored split."""
    from riftco.data import parse_instructions

    return parse_instructions(work.store.read_bytes(instructions), source="instructions")


def _shown(work: Work, steps: int) -> Any:
    """A metric sink that reports training steps as progress."""

    def sink(metric: "TrainingMetric") -> None:
        if metric.phase == "train":
            work.progress(metric.step, steps, loss=metric.loss_average or metric.loss)

    return sink


def _put_metrics(work: Work, metrics: "Iterable[TrainingMetric]") -> Ref:
    return work.store.put_bytes("metrics", b"".join(canonical_json(asdict(m)) + b"\n" for m in metrics))
