"""The run's report, as content like everything else; the command line lays it out under `runs/`."""

from artifacts import Ref
from riftco import report as page
from tasks.call import Results, Work
from tasks.prepare import read_json, read_records
from tasks.step import step


@step(version=2)
def plot_loss(
    work: Work, title: str, metrics: Ref, scores: Ref | None = None, corpus_facts: Ref | None = None
) -> Results:
    """A picture of a training's loss, in bits per byte if its scores are given."""
    bytes_per_token = read_json(work.store, scores)["bytes_per_token"] if scores else None
    floor = read_json(work.store, corpus_facts)["entropy_floor"] if corpus_facts else None
    curve = page.loss_curve(
        read_records(work.store, metrics), title, bytes_per_token=bytes_per_token, entropy_floor=floor
    )
    return {"plot": work.store.put_bytes("image", curve)}


@step(version=2)
def report(
    work: Work,
    name: str,
    corpus_facts: Ref,
    metrics: Ref,
    scores: Ref,
    samples: Ref,
    answers: dict[str, Ref],
    comparison: Ref,
    exchanges: Ref,
    bundles: dict[str, Ref],
) -> Results:
    """A Markdown page of what the run found, and a picture of its loss."""
    corpus, pretraining = read_json(work.store, corpus_facts), read_json(work.store, scores)
    findings = page.RunFindings(
        run=name,
        corpus=corpus,
        pretraining=pretraining,
        stories=read_json(work.store, samples),
        answers={model: read_json(work.store, ref) for model, ref in answers.items()},
        ranks=read_json(work.store, comparison),
        serving=read_json(work.store, exchanges),
        bundles={stage: work.store.load_bundle(ref).artifact_id for stage, ref in bundles.items()},
    )
    curve = page.loss_curve(
        read_records(work.store, metrics),
        "Pretraining loss",
        bytes_per_token=pretraining["bytes_per_token"],
        entropy_floor=corpus["entropy_floor"],
    )
    return {
        "report": work.store.put_bytes("report", page.markdown(findings).encode()),
        "plot": work.store.put_bytes("image", curve),
    }
