"""Settings from files and assignments, and the errors people get for misspelt or impossible ones."""

from pathlib import Path

import pytest

from riftco.config import PipelineConfig, PretrainingConfig, contract_dump
from riftco.errors import InputError
from riftco.settings import load_config

DEFAULTS = PipelineConfig()


def test_a_file_then_assignments_change_only_what_they_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("name: mine\npretraining:\n  steps: 120\n  learning_rate: 3.0e-4\n")
    config = load_config(
        DEFAULTS, file, ["pretraining.steps=134", "corpus.path=a=b.txt", "rank_sweep.ranks=[1, 3]"]
    )
    assert (config.name, config.pretraining.steps, config.pretraining.learning_rate) == ("mine", 134, 3e-4)
    assert (config.corpus.path, config.rank_sweep.ranks) == ("a=b.txt", (1, 3))
    assert config.pretraining.batch_size == DEFAULTS.pretraining.batch_size
    assert config.serving == DEFAULTS.serving


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2", 2.0), (".5", 0.5)])
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert (
        load_config(DEFAULTS, None, [f"pretraining.learning_rate={text}"]).pretraining.learning_rate == value
    )


def test_what_only_looks_like_a_date_is_text() -> None:
    assert load_config(DEFAULTS, None, ["name=2024-13-45"]).name == "2024-13-45"


def test_nothing_resets_an_optional_setting() -> None:
    assert load_config(DEFAULTS, None, ["corpus.path="]).corpus.path is None


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("pretraining.stepz=1", "unknown setting pretraining.stepz; did you mean pretraining.steps?"),
        ("serving.qqq=1", "unknown setting serving.qqq; there are backend, maximum_new_tokens"),
        ("steps", "write it as field.name=value"),
        ("pretraining.steps=0", r"pretraining.steps: .*greater than 0, got 0"),
        ("pretraining.steps=true", r"pretraining.steps: .*valid integer, got True"),
        ("pretraining.steps=1.5", r"pretraining.steps: .*valid integer, got 1.5"),
        ("pretraining.head_count=7", "model_width [0-9]+ is not a multiple of head_count 7"),
        ("pretraining.learning_rate=.nan", r"pretraining.learning_rate: .*, got nan"),
        ("name=Not A Name", "name: "),
    ],
)
def test_a_wrong_assignment_is_one_clear_line(assignment: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_config(DEFAULTS, None, [assignment])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["- a list", "a: [1", "", b"\xff\xfe"])
def test_a_file_that_is_not_a_mapping_is_refused_by_name(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"settings\.yaml"):
        load_config(DEFAULTS, file)
    with pytest.raises(InputError, match="No such file"):
        load_config(DEFAULTS, tmp_path / "absent.yaml")


def test_metadata_lists_an_extension_only_when_it_is_used() -> None:
    assert "optimizer" not in contract_dump(PretrainingConfig())
    assert "sampling_strategy" not in contract_dump(PretrainingConfig())
    used = contract_dump(PretrainingConfig(optimizer="adamw", sampling_strategy="document_rows"))
    assert (used["optimizer"], used["sampling_strategy"]) == ("adamw", "document_rows")
