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
    bytes_per_token: Mapping[str, float] | None = None,
    entropy_floor: float | None = None,
) -> bytes:
    """A PNG of training and validation loss over steps, with the entropy floor, in bits per byte, as a line.

    Losses are nats per token, and bits per byte where the mean bytes of a token are given for each phase.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for phase, field, style in (("train", "loss_average", "-"), ("validation", "loss", "o")):
        scale = 1.0 if bytes_per_token is None else 1 / math.log(2) / bytes_per_token[phase]
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
    text = "## Stories\n\n" + "".join(f"{_quoted(story)}\n\n" for story in samples["stories"][:3])
    if "consistent" in samples:
        aspects = ("consistent", "person", "object", "place")
        shares = [f"{100 * samples[aspect]:.0f} %" for aspect in aspects]
        heads = (f"of {len(samples['stories'])} stories", "in person", "in object", "in place")
        text += table(heads, [("consistent: " + shares[0], *shares[1:])])
    return text


def _questions(findings: RunFindings) -> str:
    answers = findings.answers.values()  # all to the same questions
    first = next(iter(answers))
    rows = [_questions_row("all", answers)]
    for kind in first["by_kind"]:  # empty where records have no kind
        rows.append(_questions_row(kind.replace("_", " "), [each["by_kind"][kind] for each in answers]))
    text = "## Questions answered right\n\n" + table(("kind", "questions", *findings.answers), rows)
    if first["too_long"]:
        text += f"\n{first['too_long']} more are longer than the context with their answer, and left out.\n"
    return text


def _questions_row(kind: str, scores: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    scores = list(scores)
    return (kind, str(scores[0]["questions"]), *(_percent(score["accuracy"]) for score in scores))


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
    cut = "" if exchange["asked"] == exchange["prompt"] else " …"
    return f"## Served\n\n```text\n> {exchange['asked']}{cut}\n{answer}\n```\n"


def _bundles(findings: RunFindings) -> str:
    return "## Bundles\n\n" + table(("stage", "artifact id"), findings.bundles.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _quoted(text: str) -> str:
    """A Markdown quotation, line by line."""
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.0f} %"
