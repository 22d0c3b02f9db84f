"""Settings from files and assignments, and the errors people get for misspelt or impossible ones."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from riftco.config import (
    FinetuneFlowConfig,
    PipelineConfig,
    PretrainingConfig,
    ServingConfig,
    contract_dump,
)
from riftco.errors import InputError
from riftco.settings import load_config, settings_yaml

DEFAULTS = PipelineConfig()
TEXTS = ("base", "name", "instructions.split_seed", "instructions.path")


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


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2", 2.0), (".5", 0.5), ("+4.E-2", 0.04)])
def test_numbers_are_read_as_people_write_them(text: str, value: float, tmp_path: Path) -> None:
    assert rates_of(text, tmp_path) == [value, value]


@pytest.mark.parametrize("text", ["0100", "1:30", "0x10", "0b1", "1_0", "yes", ".inf", "1e999", "2024-11-05"])
def test_nothing_else_is_a_number(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pretraining\.learning_rate"):
        load_config(DEFAULTS, None, [f"pretraining.learning_rate={text}"])
    (tmp_path / "settings.yaml").write_text(f"pretraining: {{learning_rate: {text}}}")
    with pytest.raises(InputError, match=r"pretraining\.learning_rate"):
        load_config(DEFAULTS, tmp_path / "settings.yaml")


def rates_of(text: str, folder: Path) -> list[float]:
    """The learning rate as a file and as an assignment give it."""
    file = folder / "settings.yaml"
    file.write_text(f"pretraining:\n  learning_rate: {text}\n")
    assignment = f"pretraining.learning_rate={text}"
    both = load_config(DEFAULTS, file), load_config(DEFAULTS, None, [assignment])
    return [config.pretraining.learning_rate for config in both]


@pytest.mark.parametrize("text", ["4e-3", "0100", "yes", "true", "null", "~", "2024-11-05", "1:30", "#", "="])
def test_listed_settings_give_texts_again(text: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    config = load_config(DEFAULTS, None, [f"instructions.split_seed='{text}'"])
    file.write_text(settings_yaml(config))
    assert load_config(DEFAULTS, file) == config
    assert config.instructions.split_seed == text


@pytest.mark.parametrize("setting", ["corpus.path", "instructions.path", "base"])
def test_an_empty_path_is_no_path(setting: str) -> None:
    flow = FinetuneFlowConfig() if setting != "corpus.path" else DEFAULTS
    with pytest.raises(InputError, match=f"{setting}: String should have at least 1 character"):
        load_config(flow, None, [f'{setting}=""'])


@pytest.mark.parametrize("text", ["2024-13-45", "2024-11-05", "9e0745", "123456", "0123", "1e3", "true"])
def test_a_text_setting_takes_whatever_is_given_as_text(text: str) -> None:
    config = load_config(FinetuneFlowConfig(), None, [f"{s}={text}" for s in TEXTS])
    assert (config.base, config.name, config.instructions.split_seed) == (text, text, text)
    assert config.instructions.path == text


@pytest.mark.parametrize(
    ("given", "value"),
    [("a #b: c", "a #b: c"), ("'null'", "null"), ('"\\n"', "\n"), ('"8"', "8"), ('""', "")],
)
def test_a_text_is_taken_as_it_stands_unless_it_is_quoted(given: str, value: str) -> None:
    config = load_config(DEFAULTS, None, [f"instructions.split_seed={given}"])
    assert config.instructions.split_seed == value


def test_null_resets_an_optional_setting_and_an_empty_value_is_refused() -> None:
    mine = load_config(DEFAULTS, None, ["corpus.path=mine.txt"])
    assert load_config(mine, None, ["corpus.path=null"]).corpus.path is None
    for empty in ("corpus.path=", "corpus.path= "):
        with pytest.raises(InputError, match=r"write corpus\.path=null for nothing"):
            load_config(mine, None, [empty])


@pytest.mark.parametrize("config", [PipelineConfig(), FinetuneFlowConfig(), ServingConfig()])
def test_all_settings_as_yaml_are_read_back(tmp_path: Path, config: BaseModel) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(settings_yaml(config), encoding="utf-8")
    assert load_config(config, file) == config


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("validation_fraction=0.1", r"did you mean corpus\.validation_fraction or instructions\.valid"),
        ("pretraining.stepz=1", "unknown setting pretraining.stepz; did you mean pretraining.steps?"),
        ("serving.qqq=1", "unknown setting serving.qqq; there are backend, maximum_new_tokens"),
        ("steps", "write it as field.name=value"),
        ("steps.x=5", "unknown setting steps; did you mean pretraining.steps or post_training.steps?"),
        ("pretraining.steps=0", r"pretraining.steps: .*greater than 0, got 0"),
        ("pretraining.steps=true", r"pretraining.steps: .*valid integer, got True"),
        ("pretraining.steps=1.5", r"pretraining.steps: .*valid integer, got 1.5"),
        ("pretraining.head_count=7", "model_width [0-9]+ is not a multiple of head_count 7"),
        ("pretraining.learning_rate=.nan", r"pretraining.learning_rate: .*, got '.nan'"),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: a\nname: b\n", "line 2: name is on line 1"),
        (
            "corpus:\n  stories: 5\npretraining: {steps: 9}\ncorpus:\n  events: [1]\n",
            "line 4: corpus is on line 1",
        ),
        ("corpus:\n  stories: 5\n  stories: 6\n", "line 3: stories is on line 2"),
    ],
)
def test_a_setting_given_twice_in_a_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        load_config(DEFAULTS, file)


def test_a_file_may_merge_mappings(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("post_training: &tuning {steps: 50}\npretraining:\n  <<: *tuning\n  batch_size: 4\n")
    config = load_config(DEFAULTS, file)
    assert (config.pretraining.steps, config.pretraining.batch_size) == (50, 4)
    with pytest.raises(InputError, match="pretraining"):
        load_config(DEFAULTS, None, ["pretraining=" + "[" * 5_000])


def test_a_setting_given_twice_in_an_assignment_is_refused() -> None:
    with pytest.raises(InputError, match=r"--set corpus=.*stories is on line 1 already"):
        load_config(DEFAULTS, None, ["corpus={stories: 5, stories: 6}"])


def test_metadata_lists_an_extension_only_when_it_is_used() -> None:
    assert "optimizer" not in contract_dump(PretrainingConfig())
    assert "sampling_strategy" not in contract_dump(PretrainingConfig())
    used = contract_dump(PretrainingConfig(optimizer="adamw", sampling_strategy="document_rows"))
    assert (used["optimizer"], used["sampling_strategy"]) == ("adamw", "document_rows")
