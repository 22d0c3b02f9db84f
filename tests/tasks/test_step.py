"""The key of a step: everything that can change the results is in it, and nothing else."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import tasks.train
from artifacts import Ref, Store
from riftco.config import OPERATION, PipelineConfig, PostTrainingConfig, PretrainingConfig
from riftco.log import LOGGER
from tasks.call import Call, Results, Runner, Unmade, Work
from tasks.runner import PlainRunner
from tasks.step import main_result, step

TEXT = Ref("text", "0" * 64)
OTHER = Ref("text", "1" * 64)


class Recorder(Runner):
    """Notes the calls and answers each with one result."""

    def __init__(self) -> None:
        super().__init__(Store.preview("absent"), "demo")
        self.calls: list[Call] = []

    def run(self, call: Call) -> Results:
        self.calls.append(call)
        return {"text": TEXT}

    def run_all(self, calls: Any) -> list[Results]:
        return [self.run(call) for call in calls]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


@step(version=3)
def cut_text(work: Work, text: Ref, size: int = 5) -> Results:
    """The beginning of a text."""
    return {"text": work.store.put_bytes("text", work.store.read_bytes(text)[:size])}


@step(version=1, ignore=("config.evaluation_interval", "workers"))
def train(work: Work, config: PretrainingConfig, workers: int = 1) -> Results:
    raise NotImplementedError


@step(version=1)
def plan_all(work: Work, config: PipelineConfig) -> Results:
    raise NotImplementedError


@step(version=1)
def take(work: Work, value: Any) -> Results:
    raise NotImplementedError


def key_of(recorder: Recorder, function: Any, **arguments: Any) -> str:
    function(**arguments)
    return recorder.calls[-1].key


def other_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Of every leaf of nested settings: its path, and the settings with a different value there alone."""
    for name in type(value).model_fields:
        field, here = getattr(value, name), f"{path}.{name}" if path else name
        if isinstance(field, BaseModel):
            for inner_path, inner in other_values(field, here):
                yield inner_path, value.model_copy(update={name: inner})
        else:
            yield here, value.model_copy(update={name: different(field)})


def different(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case tuple():
            return value[:-1] or ("x",)
        case None:
            return "x"
    raise AssertionError(f"no other value is known for {value!r}")


def test_a_call_is_described_with_its_defaults(recorder: Recorder) -> None:
    assert cut_text(text=TEXT) == {"text": TEXT}
    call = recorder.calls[0]
    assert (call.step, call.version, call.stage, call.title) == ("cut-text", 3, "cut-text", "cut-text")
    assert call.arguments == {"text": TEXT, "size": 5}
    assert call.recipe == {"text": {"kind": "text", "digest": "0" * 64}, "size": 5}


def test_arguments_by_position_by_name_and_by_default_give_one_key(recorder: Recorder) -> None:
    cut_text(TEXT, 5)
    cut_text(size=5, text=TEXT)
    cut_text(text=TEXT)
    assert len({call.key for call in recorder.calls}) == 1


def test_every_field_of_every_setting_is_in_the_key(recorder: Recorder) -> None:
    base = key_of(recorder, plan_all, config=PipelineConfig())
    changed = dict(other_values(PipelineConfig()))
    keys = {path: key_of(recorder, plan_all, config=config) for path, config in changed.items()}
    assert {"pretraining.learning_rate", "rank_sweep.training.lora.targets", "corpus.path"} < set(keys)
    assert base not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_only_ignored_fields_are_left_out_of_the_key(recorder: Recorder) -> None:
    base = key_of(recorder, train, config=PretrainingConfig())
    assert key_of(recorder, train, config=PretrainingConfig(), workers=8) == base
    for path, config in other_values(PretrainingConfig()):
        same = key_of(recorder, train, config=config) == base
        assert same == (path == "evaluation_interval"), path


@pytest.mark.parametrize(
    ("trainer", "config"),
    [(tasks.train.pretrain, PretrainingConfig()), (tasks.train.post_train, PostTrainingConfig())],
)
def test_of_a_training_only_what_cannot_change_it_is_left_out(
    recorder: Recorder, trainer: Any, config: Any
) -> None:
    inputs = {
        name: TEXT for name in inspect.signature(trainer.body).parameters if name not in ("work", "config")
    }
    base = key_of(recorder, trainer, config=config, **inputs)
    same = {
        path
        for path, other in other_values(config)
        if key_of(recorder, trainer, config=other, **inputs) == base
    }
    assert same == set(OPERATION)


def test_inputs_count_by_kind_and_content_not_by_place(recorder: Recorder) -> None:
    base = key_of(recorder, cut_text, text=TEXT)
    assert key_of(recorder, cut_text, text=Ref("text", "0" * 64, "file:///elsewhere")) == base
    assert key_of(recorder, cut_text, text=OTHER) != base
    assert key_of(recorder, cut_text, text=Ref("stories", "0" * 64)) != base


def test_step_name_and_version_are_in_the_key(recorder: Recorder) -> None:
    def cut_text(work: Work, text: Ref, size: int = 5) -> Results:
        raise NotImplementedError

    def crop_text(work: Work, text: Ref, size: int = 5) -> Results:
        raise NotImplementedError

    made = [step(version=v)(body) for v in (1, 2) for body in (cut_text, crop_text)]
    assert len({key_of(recorder, function, text=TEXT) for function in made}) == 4


KEY = """
import sys
from pathlib import Path
from artifacts import Ref, Store
from riftco.config import PipelineConfig
from tests.tasks.test_step import Recorder, take
with Recorder() as recorder:
    store = Store.open(Path(sys.argv[1]))
    take(value={"b": (PipelineConfig(), [store.put_bytes("text", b"same")]), "a": None, "c": 0.1})
    print(recorder.calls[0].key)
"""


def test_the_key_is_the_same_in_any_store_folder_and_process(tmp_path: Path) -> None:
    keys = set()
    for seed in ("0", "1"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", KEY, str(folder / "store")]
        keys.add(subprocess.check_output(command, cwd=folder, env=environment, text=True))
    assert len(keys) == 1


class SettingsWithSet(BaseModel):
    names: set[str] = {"a", "b"}


@pytest.mark.parametrize(
    "value",
    [
        Path("text.txt"),
        float("nan"),
        b"bytes",
        {"a", "b"},
        {1: "a"},
        len,
        object(),
        SettingsWithSet(),
        [{"deep": Path("text.txt")}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_stable_form_is_refused_by_the_name_of_its_argument(
    recorder: Recorder, value: Any
) -> None:
    take(value=value)
    with pytest.raises(TypeError, match=r"take.*value"):
        _ = recorder.calls[0].key


def test_a_plan_tells_which_stages_a_call_waits_for(recorder: Recorder) -> None:
    take(value=[Unmade("b"), {"x": (Unmade("a"), TEXT)}, Unmade("b")])
    assert recorder.calls[0].waits_for == ("b", "a")


def test_map_calls_once_for_each_element(recorder: Recorder) -> None:
    results = cut_text.map(text=TEXT, size=[2, 8])
    assert results == [{"text": TEXT}] * 2
    assert [call.arguments["size"] for call in recorder.calls] == [2, 8]
    assert [call.stage for call in recorder.calls] == ["cut-text-2", "cut-text-8"]
    assert [call.title for call in recorder.calls] == ["cut-text 2", "cut-text 8"]


def test_map_names_what_has_no_short_value_by_position(recorder: Recorder) -> None:
    cut_text.map(text=[TEXT, OTHER])
    take.map(value=["a/b", "x" * 41])
    take.map(value=[(1, 2)])
    stages = [call.stage for call in recorder.calls]
    assert stages == ["cut-text-0", "cut-text-1", "take-0", "take-1", "take-0"]
    assert recorder.calls[-1].arguments == {"value": (1, 2)}


def test_map_over_nothing_calls_nothing(recorder: Recorder) -> None:
    assert take.map(value=[]) == []


@pytest.mark.parametrize("arguments", [{"text": TEXT}, {"text": [TEXT], "size": [1, 2]}])
def test_map_refuses_lists_that_do_not_match(recorder: Recorder, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lists of one length"):
        cut_text.map(**arguments)


def test_a_named_step_keeps_its_key(recorder: Recorder) -> None:
    cut_text(text=TEXT)
    cut_text.named("cut-again")(text=TEXT)
    first, second = recorder.calls
    assert (first.stage, second.stage) == ("cut-text", "cut-again")
    assert first.key == second.key


def test_a_wrong_argument_is_refused_before_anything_runs(recorder: Recorder) -> None:
    with pytest.raises(TypeError, match="sise"):
        cut_text(text=TEXT, sise=3)  # type: ignore[call-arg]
    assert recorder.calls == []


def test_the_body_can_be_called_alone(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    runner = PlainRunner(store, "alone")
    workspace = store.workspace("0" * 64)
    work = Work(store, runner.run_name, LOGGER, lambda done, total, **numbers: None, workspace, tmp_path)
    results = cut_text.body(work, text=store.put_bytes("text", b"abcdef"), size=2)
    assert store.read_bytes(main_result(results)) == b"ab"


def test_a_step_outside_a_runner_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"cut-text .* no runner is active"):
        cut_text(text=TEXT)


def test_a_runner_is_active_only_inside_its_block() -> None:
    with Recorder() as outer:
        with Recorder() as inner:
            cut_text(text=TEXT)
        cut_text(text=TEXT)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)


def _without_work(text: Ref) -> Results:
    raise NotImplementedError


def _with_rest(work: Work, **options: Any) -> Results:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("body", "version", "message"),
    [
        (_without_work, 1, "first parameter must be `work`"),
        (_with_rest, 1, "parameter of its own"),
        (cut_text.body, 0, "version"),
        (cut_text.body, True, "version"),
    ],
)
def test_a_step_that_could_not_have_a_key_is_refused(body: Any, version: int, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        step(version=version)(body)


def test_an_ignored_field_that_is_not_there_is_an_error(recorder: Recorder) -> None:
    @step(version=1, ignore=("config.evaluation_intervall",))
    def misspelt(work: Work, config: PretrainingConfig) -> Results:
        raise NotImplementedError

    with pytest.raises(TypeError, match=r"config\.evaluation_intervall"):
        misspelt(config=PretrainingConfig())


def test_steps_and_plans_need_neither_prefect_nor_torch() -> None:
    code = "import sys, tasks.runner, tasks.plan; print(sorted({'prefect', 'torch'} & set(sys.modules)))"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).parents[2], text=True)
    assert output.strip() == "[]"
