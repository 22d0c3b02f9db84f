"""What a run found, for people: one Markdown page and one picture of the loss."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunFindings:
    """The JSON results of a pipeline's stages, and its bundles by name."""

    run: str
    corpus: Mapping[str, Any]
    pretraining: Mapping[str, Any]
    stories: Mapping[str, Any]
    answers: Mapping[str, Mapping[str, Any]]
    """Model name, such as `pretrained`, to its answers."""
    ranks: Mapping[str, Any]
    serving: Mapping[str, Any]
    bundles: Mapping[str, str]
    """Stage to artifact id."""


def markdown(findings: RunFindings) -> str:
    """The page; it links to `loss.png` beside it."""
    sections = (_loss, _stories, _questions, _ranks, _serving, _bundles)
    return f"# Run {findings.run}\n\n" + "\n".join(section(findings) for section in sections)


def loss_curve(
    metrics: Iterable[Mapping[str, Any]],
    title: str,
    *,
    bytes_per_token: float | None = None,
    entropy_floor: float | None = None,
) -> bytes:
    """A PNG of training and validation loss over steps, with the entropy floor, in bits per byte, as a line.

    Losses are nats per token, and bits per byte where the corpus's mean bytes per token are given.
    """
    from matplotlib.figure import Figure

    scale = 1.0 if bytes_per_token is None else 1 / math.log(2) / bytes_per_token
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for phase, field, style in (("train", "loss_average", "-"), ("validation", "loss", "o")):
        points = [(m["step"], m[field] * scale) for m in metrics if m["phase"] == phase]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=phase, markersize=4, linewidth=1.2)
    if entropy_floor is not None:
        label = f"entropy of the stories, {entropy_floor:.3f}"
        axes.axhline(entropy_floor, color="black", linestyle="--", linewidth=1, label=label)
    unit = "nats per token" if bytes_per_token is None else "bits per byte"
    axes.set(xlabel="step", ylabel=unit, yscale="log", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120, metadata={"Software": None})
    return image.getvalue()


def _loss(findings: RunFindings) -> str:
    bits, floor = findings.pretraining["bits_per_byte"], findings.corpus["entropy_floor"]
    rows = [("validation loss", f"{bits:.4f} bits per byte")]
    if floor is not None:
        rows.append(("entropy floor", f"{floor:.4f} bits per byte, the best any model can do"))
        rows.append(("above the floor", f"{bits - floor:.4f} bits per byte"))
    rows.append(("parameters", f"{findings.pretraining['parameters']:,}"))
    return "## Pretraining\n\n" + table(("", ""), rows) + "\n![Loss over steps](loss.png)\n"


def _stories(findings: RunFindings) -> str:
    samples = findings.stories
    text = "## Stories\n\n" + "".join(f"> {story}\n\n" for story in samples["stories"][:3])
    if "consistent" in samples:
        aspects = ("consistent", "person", "object", "place")
        shares = [f"{100 * samples[aspect]:.0f} %" for aspect in aspects]
        heads = (f"of {len(samples['stories'])} stories", "in person", "in object", "in place")
        text += table(heads, [("consistent: " + shares[0], *shares[1:])])
    return text


def _questions(findings: RunFindings) -> str:
    models = list(findings.answers)
    first = findings.answers[models[0]]
    rows = [("all", *(_percent(findings.answers[m]["accuracy"]) for m in models))]
    for kind in first["accuracy_by_kind"]:  # empty where records have no kind
        shares = (findings.answers[m]["accuracy_by_kind"][kind] for m in models)
        rows.append((kind.replace("_", " "), *map(_percent, shares)))
    return f"## Questions answered right, of {first['questions']}\n\n" + table(("kind", *models), rows)


def _ranks(findings: RunFindings) -> str:
    ranks = findings.ranks
    rows = [("base", "", f"{ranks['base_validation_loss']:.4f}", f"{ranks['base_test_loss']:.4f}")]
    for trial in ranks["trials"]:
        best = trial["rank"] == ranks["best_rank"]
        test = f"{ranks['best_test_loss']:.4f}" if best else ""
        name = f"**{trial['rank']}** (best)" if best else str(trial["rank"])
        rows.append((name, f"{trial['alpha']:g}", f"{trial['validation_loss']:.4f}", test))
    return "## LoRA ranks\n\n" + table(("rank", "alpha", "validation loss", "test loss"), rows)


def _serving(findings: RunFindings) -> str:
    exchange = findings.serving["exchanges"][0]
    answer = exchange["answer"].split("\n")[0]
    return f"## Served\n\n```text\n> {exchange['prompt']}\n{answer}\n```\n"


def _bundles(findings: RunFindings) -> str:
    return "## Bundles\n\n" + table(("stage", "artifact id"), findings.bundles.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
