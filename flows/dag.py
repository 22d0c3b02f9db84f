"""The DAGs as plain functions over steps: run here, only planned, or run under Prefect."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from artifacts import ModelBundle, Ref, Store
from riftco.config import FinetuneFlowConfig, PipelineConfig, PretrainFlowConfig, PretrainingConfig
from riftco.data import load_instructions, read_corpus
from riftco.errors import InputError
from tasks.call import Results
from tasks.check import check_tuning
from tasks.evaluate import answer_questions, sample_stories
from tasks.prepare import fit_tokenizer, prepare_corpus, prepare_instructions
from tasks.report import plot_loss, report
from tasks.serve import check_serving
from tasks.train import post_train, pretrain, select_rank, tune_rank

FlowConfig = PipelineConfig | PretrainFlowConfig | FinetuneFlowConfig


@dataclass(frozen=True)
class Sources:
    """The user's own files as content: a step is keyed by what is in them, not by where they lie."""

    corpus: Ref | None = None
    instructions: Ref | None = None
    base: Ref | None = None

    @classmethod
    def read(cls, config: FlowConfig, store: Store, *, put: bool) -> Self:
        """Read what the configuration names, and with `put` store the files; else only hash them.

        InputError with file, line and remedy for what is not UTF-8 text or instruction JSONL; BundleError or
        StoreError for a base that is no model.
        """
        to = store if put else None
        text = lines = base = None
        if not isinstance(config, FinetuneFlowConfig) and config.corpus.path is not None:
            text = read_corpus(config.corpus.path).encode()
        if not isinstance(config, PretrainFlowConfig) and config.instructions.path is not None:
            load_instructions(config.instructions.path)
            lines = Path(config.instructions.path).read_bytes()
        if isinstance(config, FinetuneFlowConfig):
            base = _base(config.base, store, to)
        return cls(_content(to, "text", text), _content(to, "instructions", lines), base)


def pretrain_dag(config: PretrainFlowConfig, sources: Sources) -> Results:
    """Raw text to a model; its bundle, the picture of its loss and what it writes."""
    corpus = prepare_corpus(source=sources.corpus, config=config.corpus.effective())
    tokenizer = _tokenizer(corpus, config.pretraining)
    trained = _pretrained(corpus, tokenizer, config.pretraining)
    samples = sample_stories(bundle=trained["bundle"], corpus_facts=corpus["facts"], config=config.evaluation)
    plot = plot_loss(
        title="Pretraining loss",
        metrics=trained["metrics"],
        scores=trained["scores"],
        corpus_facts=corpus["facts"],
    )
    return {"bundle": trained["bundle"], "plot": plot["plot"], "samples": samples["samples"]}


def finetune_dag(config: FinetuneFlowConfig, sources: Sources) -> Results:
    """A model and instructions to a tuned, served one; its bundle, picture of the loss and answers."""
    assert sources.base is not None, "the sources of a finetune flow have a base"
    instructions = prepare_instructions(source=sources.instructions, config=config.instructions.effective())
    check_tuning(
        tokenizer=sources.base,
        instructions=instructions,
        setting="post_training",
        rank=config.post_training.lora.rank,
        config=config.post_training,
    )
    tuned = post_train(
        base=sources.base,
        training=instructions["train"],
        validation=instructions["validation"],
        config=config.post_training,
    )
    plot = plot_loss(title="Tuning loss", metrics=tuned["metrics"])
    answers = answer_questions(bundle=tuned["bundle"], test=instructions["test"], config=config.evaluation)
    check_serving(bundle=tuned["bundle"], test=instructions["test"], config=config.serving)
    return {"bundle": tuned["bundle"], "plot": plot["plot"], "answers": answers["answers"]}


def pipeline_dag(config: PipelineConfig, sources: Sources) -> Results:
    """Raw text and instructions to a served model; the results of the report."""
    corpus = prepare_corpus(source=sources.corpus, config=config.corpus.effective())
    instructions = prepare_instructions(source=sources.instructions, config=config.instructions.effective())
    tokenizer = _tokenizer(corpus, config.pretraining, instructions["train"])
    check_tuning(
        tokenizer=tokenizer,
        instructions=instructions,
        setting="post_training",
        rank=config.post_training.lora.rank,
        config=config.post_training,
    )
    check_tuning.named("check-rank-sweep")(
        tokenizer=tokenizer,
        instructions=instructions,
        setting="rank_sweep.training",
        rank=max(config.rank_sweep.ranks),
        config=config.rank_sweep.training,
    )
    pretrained = _pretrained(corpus, tokenizer, config.pretraining)
    base = pretrained["bundle"]
    samples = sample_stories(bundle=base, corpus_facts=corpus["facts"], config=config.evaluation)
    tuned = post_train(
        base=base,
        training=instructions["train"],
        validation=instructions["validation"],
        config=config.post_training,
    )["bundle"]
    sweep = tune_rank.map(
        rank=list(config.rank_sweep.ranks),
        base=base,
        training=instructions["train"],
        validation=instructions["validation"],
        config=config.rank_sweep,
    )
    best = select_rank(
        candidates=tuple(trial["bundle"] for trial in sweep),
        scores=tuple(trial["scores"] for trial in sweep),
        base=base,
        validation=instructions["validation"],
        test=instructions["test"],
        context_size=config.rank_sweep.training.context_size,
        batch_size=config.rank_sweep.training.batch_size,
        loss_scope=config.rank_sweep.training.loss_scope,
    )
    bundles = {"pretrained": base, "tuned": tuned, "best-rank": best["bundle"]}
    answers = {
        name: answer_questions.named(f"answer-{name}")(
            bundle=bundle, test=instructions["test"], config=config.evaluation
        )["answers"]
        for name, bundle in bundles.items()
    }
    served = check_serving(bundle=tuned, test=instructions["test"], config=config.serving)
    return report(
        name=config.name,
        corpus_facts=corpus["facts"],
        metrics=pretrained["metrics"],
        scores=pretrained["scores"],
        samples=samples["samples"],
        answers=answers,
        comparison=best["comparison"],
        exchanges=served["exchanges"],
        bundles=bundles,
    )


def _tokenizer(corpus: Results, config: PretrainingConfig, instructions: Ref | None = None) -> Ref:
    """A tokenizer of the training texts."""
    return fit_tokenizer(
        corpus=corpus["training"],
        instructions=instructions,
        method=config.tokenizer_method,
        vocabulary_size=config.vocabulary_size,
        minimum_pair_frequency=config.minimum_pair_frequency,
        end_of_text=config.end_of_text,
    )["tokenizer"]


def _pretrained(corpus: Results, tokenizer: Ref, config: PretrainingConfig) -> Results:
    return pretrain(
        training=corpus["training"], validation=corpus["validation"], tokenizer=tokenizer, config=config
    )


def _base(name: str, store: Store, to: Store | None) -> Ref:
    """The bundle of a file or of a name in the store."""
    if not (name.endswith(".rift") or Path(name).is_file()):
        ref = store.resolve(name)
        if ref.kind != "bundle":
            raise InputError(f"base {name} is of kind {ref.kind}, not a model; name a bundle")
        return ref
    bundle = ModelBundle.load(name)
    return to.put_bundle(bundle) if to else Ref("bundle", hashlib.sha256(Path(name).read_bytes()).hexdigest())


def _content(store: Store | None, kind: str, data: bytes | None) -> Ref | None:
    if data is None:
        return None
    return store.put_bytes(kind, data) if store else Ref(kind, hashlib.sha256(data).hexdigest())
