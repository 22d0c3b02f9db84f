"""The report says what the run found, and only that."""

import io
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from riftco.report import RunFindings, loss_curve, markdown

BYTES_PER_TOKEN = {"train": 4.0, "validation": 3.5}
METRICS = [
    {"phase": "validation", "step": 0, "loss": 5.0, "loss_average": None},
    *({"phase": "train", "step": i, "loss": 5 / i, "loss_average": 5 / i} for i in range(1, 40)),
    {"phase": "validation", "step": 39, "loss": 0.2, "loss_average": None},
]


def _findings(**changes: Any) -> RunFindings:
    kinds = {"first_place": {"questions": 3, "accuracy": 0.25}}
    answers = {"questions": 8, "accuracy": 0.5, "too_long": 2, "by_kind": kinds}
    findings: dict[str, Any] = {
        "run": "demo",
        "corpus": {"entropy_floor": 0.12},
        "pretraining": {"bits_per_byte": 0.135, "parameters": 1234567},
        "stories": {
            "stories": ["A.", "B.\nBb.", "C.", "D."],
            "consistent": 0.75,
            "person": 1,
            "object": 1,
            "place": 0.8,
        },
        "answers": {"pretrained": {**answers, "accuracy": 0.0}, "tuned": answers},
        "ranks": {
            "best_rank": 8,
            "base_validation_loss": 3.0,
            "base_test_loss": 3.1,
            "best_test_loss": 1.1,
            "trials": [
                {"rank": 2, "alpha": 4.0, "validation_loss": 1.5},
                {"rank": 8, "alpha": 16.0, "validation_loss": 1.0},
            ],
        },
        "serving": {"exchanges": [{"prompt": "Who is it?", "asked": "Who", "answer": "Mara.\nmore"}]},
        "bundles": {"pretrained": "ab" * 32},
    }
    return RunFindings(**findings | changes)


@pytest.mark.parametrize(
    "line",
    [
        "| validation loss | 0.1350 bits per byte |",
        "| above the floor | 0.0150 bits per byte |",
        "| consistent: 75 % | 100 % | 100 % | 80 % |",
        "> Bb.",
        "| all | 8 | 0 % | 50 % |",
        "| first place | 3 | 25 % | 25 % |",
        "2 more are longer than the context with their answer, and left out.",
        "| **8** (best) | 16 | 1.0000 | 1.1000 |",
        "| 2 | 4 | 1.5000 |  |",
        "> Who …",
        "Mara.",
        f"| pretrained | {'ab' * 32} |",
    ],
)
def test_every_finding_has_its_line(line: str) -> None:
    assert line in markdown(_findings()).splitlines()


def test_what_is_not_known_is_not_said() -> None:
    answers = {"questions": 0, "accuracy": None, "too_long": 0, "by_kind": {}}
    exchange = {"prompt": "Who?", "asked": "Who?", "answer": "Mara."}
    text = markdown(
        _findings(
            corpus={"entropy_floor": None},
            stories={"stories": ["A."]},
            answers={"tuned": answers},
            serving={"exchanges": [exchange]},
        )
    )
    assert "| all | 0 | none |" in text
    assert "left out" not in text
    assert "…" not in text
    assert "floor" not in text
    assert "consistent" not in text
    assert "> D." not in markdown(_findings())


def test_the_picture_draws_the_floor_only_where_there_is_one() -> None:
    def picture(floor: float | None) -> bytes:
        return loss_curve(METRICS, "Loss", bytes_per_token=BYTES_PER_TOKEN, entropy_floor=floor)

    with_floor, without = (
        matplotlib.image.imread(io.BytesIO(picture(floor)), format="png") for floor in (0.12, None)
    )
    assert with_floor.shape == without.shape
    assert not np.array_equal(with_floor, without)
    assert picture(0.12) == picture(0.12)


def test_the_picture_of_a_run_without_validation_and_without_bytes_is_in_nats() -> None:
    train = [metric for metric in METRICS if metric["phase"] == "train"]
    assert loss_curve(train, "Loss") != loss_curve(train, "Loss", bytes_per_token=BYTES_PER_TOKEN)


def test_each_phase_is_drawn_by_the_bytes_of_its_own_tokens() -> None:
    coarser = loss_curve(METRICS, "Loss", bytes_per_token=BYTES_PER_TOKEN | {"validation": 4.0})
    assert coarser != loss_curve(METRICS, "Loss", bytes_per_token=BYTES_PER_TOKEN)
