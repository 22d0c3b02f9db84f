"""The pipeline's DAG as a plain function over steps: run here, only planned, or run under Prefect."""

import hashlib
from dataclasses import dataclass
from typing import Self

from artifacts import Ref, Store
from riftco.config import PipelineConfig
from riftco.data import load_instructions, read_corpus
from tasks.call import Results
from tasks.evaluate import answer_questions, sample_stories
from tasks.prepare import fit_tokenizer, prepare_corpus, prepare_instructions
from tasks.report import report
from tasks.serve import check_serving
from tasks.train import post_train, pretrain, select_rank, tune_rank


@dataclass(frozen=True)
class Sources:
    """The user's own files as content: a step is keyed by what is in them, not by where they lie."""

    corpus: Ref | None
    instructions: Ref | None

    @classmethod
    def read(cls, config: PipelineConfig, store: Store | None) -> Self:
        """Read the files the configuration names and put them in the store; without one, only hash them.

        InputError with file, line and remedy for what is not UTF-8 text or instruction JSONL.
        """
        text = None if config.corpus.path is None else read_corpus(config.corpus.path).encode()
        path = config.instructions.path
        lines = None
        if path is not None:
            load_instructions(path)
            with open(path, "rb") as file:
                lines = file.read()
        return cls(_content(store, "text", text), _content(store, "instructions", lines))


def _content(store: Store | None, kind: str, data: bytes | None) -> Ref | None:
    if data is None:
        return None
    return store.put_bytes(kind, data) if store else Ref(kind, hashlib.sha256(data).hexdigest(), "")


def pipeline_dag(config: PipelineConfig, sources: Sources) -> Results:
    """Raw text and instructions to a served model; the results of the report."""
    corpus = prepare_corpus(source=sources.corpus, config=config.corpus)
    instructions = prepare_instructions(source=sources.instructions, config=config.instructions)
    pretraining = config.pretraining
    tokenizer = fit_tokenizer(
        corpus=corpus["training"],
        method=pretraining.tokenizer_method,
        vocabulary_size=pretraining.vocabulary_size,
        minimum_pair_frequency=pretraining.minimum_pair_frequency,
    )["tokenizer"]
    pretrained = pretrain(
        training=corpus["training"], validation=corpus["validation"], tokenizer=tokenizer, config=pretraining
    )
    base = pretrained["bundle"]
    samples = sample_stories(bundle=base, corpus_facts=corpus["facts"], config=config.evaluation)
    tuned = post_train(base=base, training=instructions["train"], config=config.post_training)["bundle"]
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
