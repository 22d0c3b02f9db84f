"""The `riftco` command as a person meets it: help, errors, files in and files out."""

import errno
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import parquet
from typer.testing import CliRunner, Result

from artifacts import ArtifactError, ModelBundle, Store, Workspace
from flows.cli import app
from flows.dag import Sources, pipeline_dag, pretrain_dag
from riftco.config import PretrainFlowConfig
from riftco.data import read_corpus
from tasks.call import Results
from tasks.runner import PlainRunner
from tests.artifacts.crash_model import Disk, Recorder, State, plant, tree
from tests.support import FIXTURES
from tests.tiny import SETTINGS, tiny_pipeline

BYTE = str(FIXTURES / "byte.rift")
TINY = [
    "-s",
    "steps=2",
    "-s",
    "context_size=8",
    "-s",
    "vocabulary_size=260",
]


def riftco(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIFTCO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RIFTCO_STORE", raising=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the river runs past the mill and the miller counts the grain.\n" * 8)
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "Who counts?", "response": "The miller."}) + "\n")
    return path


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("run",),
        ("run", "pipeline"),
        ("plan",),
        ("pretrain",),
        ("tune",),
        ("generate",),
        ("serve",),
        ("show",),
    ],
    ids=lambda command: "-".join(command) or "riftco",
)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    result = riftco(*command, "--help")
    assert result.exit_code == 0
    assert len(result.output) > 200


def test_pretrain_tune_generate_and_verify_work_on_plain_files(
    text: Path, chats: Path, tmp_path: Path
) -> None:
    base, tuned = tmp_path / "base.rift", tmp_path / "tuned.rift"
    result = riftco("pretrain", text, "-o", base, *TINY)
    assert result.exit_code == 0, result.output
    assert ModelBundle.load(base).artifact_id in result.output
    result = riftco("tune", base, chats, "-o", tuned, "-s", "steps=2", "-s", "context_size=8")
    assert result.exit_code == 0, result.output
    assert ModelBundle.load(tuned).parent_artifact_id == ModelBundle.load(base).artifact_id
    windows = ("-s", "sampling_strategy=window_uniform", "-s", "steps=2", "-s", "context_size=8")
    result = riftco("tune", base, chats, "-o", tmp_path / "windows.rift", *windows)
    assert result.exit_code == 0, result.output
    result = riftco("generate", tuned, "the river", "--max-new-tokens", 4)
    assert (result.exit_code, result.output.startswith("the river")) == (0, True)
    assert riftco("verify", base, tuned).exit_code == 0


def test_tuning_learns_answers_in_the_models_own_context_unless_set_otherwise(
    chats: Path, tmp_path: Path
) -> None:
    base, tuned = FIXTURES / "bpe.rift", tmp_path / "x.rift"

    def settings(*assignments: str) -> tuple[object, ...]:
        options = [part for setting in assignments for part in ("-s", setting)]
        result = riftco("tune", base, chats, "-o", tuned, "-s", "steps=1", *options)
        assert result.exit_code == 0, result.output
        config = ModelBundle.load(tuned).metadata["training_config"]
        names = ("context_size", "sampling_strategy", "loss_scope")
        return tuple(config.get(name, "full_sequence") for name in names)

    whole = ModelBundle.load(base).config.maximum_context
    assert settings() == (whole, "document_rows", "response_only")
    assert settings("context_size=9", "sampling_strategy=packed") == (9, "packed", "response_only")
    contract = ("context_size=16", "sampling_strategy=example_uniform", "loss_scope=full_sequence")
    assert settings(*contract) == (16, "example_uniform", "full_sequence")
    said = " ".join(riftco("tune", "--help").output.split())
    assert "context_size=the model's" in said
    assert "loss_scope=response_only" in said


def test_tuning_tells_the_loss_of_what_is_held_out(chats: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"prompt": "Who runs?", "response": "The river."}) + "\n")
    output = tmp_path / "x.rift"
    result = riftco(
        "tune", FIXTURES / "bpe.rift", chats, "-o", output, "--validation", held_out, "-s", "steps=2"
    )
    assert result.exit_code == 0, result.output
    phases = parquet.read_table(tmp_path / "x.rift.run" / "metrics.parquet")["phase"].to_pylist()
    assert phases == ["validation", "train", "train", "validation"]


def test_a_folder_of_texts_is_pretrained_on_as_one_corpus(text: Path, tmp_path: Path) -> None:
    folder, joined = tmp_path / "texts", tmp_path / "joined.txt"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"{name}: {text.read_text()}")
    joined.write_text(read_corpus(folder))
    ids = set()
    for number, corpus in enumerate((folder, joined)):
        output = tmp_path / f"{number}.rift"
        result = riftco("pretrain", corpus, "-o", output, *TINY, "--validation", text)
        assert result.exit_code == 0, result.output
        ids.add(ModelBundle.identify(output))
    assert len(ids) == 1


def test_generate_gives_the_recorded_continuation() -> None:
    recorded = json.loads((FIXTURES / "byte.reference.json").read_text())["greedy"][0]
    result = riftco("generate", BYTE, recorded["prompt"], "--max-new-tokens", recorded["max_new_tokens"])
    assert result.output.rstrip("\n") == recorded["text"].rstrip("\n")


def test_the_version_is_that_of_the_package() -> None:
    assert riftco("--version").output == f"riftco {importlib.metadata.version('riftco')}\n"


def test_show_tells_what_a_bundle_is() -> None:
    shown = json.loads(riftco("show", BYTE).output)
    assert shown["artifact_id"] == ModelBundle.load(BYTE).artifact_id
    assert shown["config"]["model_width"] == 16


def test_show_verify_and_plan_know_the_runs_of_the_store(tmp_path: Path) -> None:
    assert "no runs" in riftco("show").output
    store, config = Store.open(durability="none"), tiny_pipeline()
    with PlainRunner(store, config.name):
        pipeline_dag(config, Sources.read(config, store, put=True))
    assert "tiny/pretrain: bundle" in riftco("show", "tiny").output
    assert json.loads(riftco("show", "tiny/pretrain").output)["stage"] == "pretraining"
    assert re.search(r"runs/tiny: \d+ intact", riftco("verify", "runs/tiny").output)
    settings = [part for setting in SETTINGS for part in ("-s", setting)]
    assert "16 of 16 stages are up to date" in riftco("plan", *settings).output
    assert "0 of 16" not in riftco("plan", *settings, "-s", "pretraining.steps=4").output
    path = store.path(store.resolve("tiny/pretrain"))
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    broken = riftco("verify", "tiny/pretrain")
    assert (broken.exit_code, "hash" in broken.output or "damaged" in broken.output) == (2, True)


@pytest.mark.parametrize("flow", ["pipeline", "pretrain", "finetune"])
def test_plan_lists_all_settings_as_a_file_that_gives_them_again(flow: str, tmp_path: Path) -> None:
    listed = riftco("plan", flow, "--settings", "-s", "name=mine")
    assert listed.exit_code == 0, listed.output
    assert {"name: mine", "evaluation:", "  questions: 150"} <= set(listed.output.splitlines())
    file = tmp_path / "mine.yaml"
    file.write_text(listed.output)
    assert riftco("plan", flow, "--settings", "-c", file).output == listed.output
    assert f"plan {flow} --settings" in riftco("run", flow, "--help").output


def test_a_run_lists_what_it_made_and_tells_that_another_moved_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[PlainRunner] = []

    def two_runs(config: PretrainFlowConfig, *_: object) -> dict[str, Results]:
        for steps in (3, 4):
            pretraining = config.pretraining.model_copy(update={"steps": steps})
            own = config.model_copy(update={"pretraining": pretraining})
            with PlainRunner(Store.open(), own.name) as runner:
                pretrain_dag(own, Sources.read(own, runner.store, put=True))
            runs.append(runner)
        return runs[0].made()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.local_server.local_prefect", nullcontext)
    monkeypatch.setattr("flows.cli.import_module", lambda name: SimpleNamespace(pretrain=two_runs))
    ours = [s for s in SETTINGS if s.startswith(("name", "corpus", "pretraining", "evaluation"))]
    output = riftco("run", "pretrain", *(part for setting in ours for part in ("-s", setting))).output
    first, second = (runner.store.path(runner.made()["pretrain"]["bundle"]).name for runner in runs)
    assert (first in output, second in output) == (True, False), output
    assert "another run moved tiny/pretrain, tiny/sample-stories, tiny/plot-loss meanwhile" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pretrain", "absent.txt", "-o", "x.rift"), "absent.txt: no such file"),
        (("pretrain", BYTE, "-o", "x.rift"), "not UTF-8"),
        (("pretrain", "chats.jsonl", "-o", "x.rift"), "chats.jsonl: is no plain text by its name"),
        (("run", "pretrain", "-s", "corpus.path=t.CSV"), "t.CSV: is no plain text by its name"),
        (("generate", "absent.rift", "x"), "absent.rift"),
        (("generate", "nothing/here", "x"), "nothing/here"),
        (("generate", BYTE, "Ω"), "vocabulary"),
        (("serve", BYTE, "--host", "0.0.0.0"), "riftco key"),
        (("serve", BYTE, BYTE), "NAME=MODEL"),
        (("serve", BYTE, "--keys", "absent.txt"), "absent.txt"),
        (("plan", "-s", "pretraining.stepz=1"), "did you mean pretraining.steps?"),
        (("run", "pipeline", "-s", "corpus.path=absent.txt"), "absent.txt: no such file"),
        (("run", "pipeline", "-s", "instructions.path=absent.jsonl"), "absent.jsonl"),
        (("verify", str(FIXTURES / "http.json")), "http.json"),
        (
            ("run", "pipeline", "--force", "pretrian"),
            "no stage is called 'pretrian'; the stages are",
        ),
        (("run", "pipeline", "--from-stage", "nothing"), "no stage is called 'nothing'"),
        (("plan", "-s", "rank_sweep.ranks=[2, 2]"), "ranks must be distinct"),
        (("plan", "-s", "rank_sweep.ranks=[512]"), "512 exceeds 128"),
        (("plan", "-s", "rank_sweep.training.fine_tuning_method=full"), "must be lora"),
        (("plan", "-s", "pretraining.context_size=64"), "post_training.context_size 144 exceeds"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = riftco(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", ":2: is not a JSON object"),
        ('{"prompt": "x"}', ":2: lacks the key"),
        ("{", ":2: is not strict JSON"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(chats: Path, tmp_path: Path, line: str, message: str) -> None:
    chats.write_text(chats.read_text() + line + "\n")
    result = riftco("tune", BYTE, chats, "-o", tmp_path / "x.rift", "-s", "context_size=4")
    assert (result.exit_code, f"{chats}{message}" in result.output) == (2, True)
    assert not (tmp_path / "x.rift").exists()


@pytest.mark.parametrize("settings", [("learning_rate=1e30",), ("learning_rate=1e39",)])
def test_training_that_diverges_is_one_line(text: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    options = [part for setting in (*settings, "steps=4") for part in ("-s", setting)]
    result = riftco("pretrain", text, "-o", tmp_path / "x.rift", *TINY, *options)
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert not (tmp_path / "x.rift").exists()


def test_a_rank_the_model_cannot_have_is_one_line(chats: Path, tmp_path: Path) -> None:
    options = ["-s", "fine_tuning_method=lora", "-s", "lora.rank=99", "-s", "context_size=8"]
    result = riftco("tune", BYTE, chats, "-o", tmp_path / "x.rift", *options)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)


def test_an_output_that_cannot_be_or_is_an_input_is_refused_before_training(
    text: Path, tmp_path: Path
) -> None:
    before = text.read_bytes()
    (tmp_path / "notes.txt").write_text("mine")
    for output, message in [
        (text, "also an input"),
        (tmp_path / "notes.txt", "notes.txt: is no bundle and would be lost; give another name"),
        (tmp_path, "is a folder"),
        (text / "x.rift", "not a folder"),
    ]:
        result = riftco("pretrain", text, "-o", output, *TINY)
        assert (result.exit_code, message in result.output) == (2, True)
    assert text.read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_bundle_may_be_replaced(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.rift"
    shutil.copyfile(BYTE, output)
    assert riftco("pretrain", text, "-o", output, *TINY).exit_code == 0
    assert ModelBundle.identify(output) != ModelBundle.identify(BYTE)


def test_a_disk_that_fills_up_names_the_file_and_the_remedy(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = tmp_path / "x.rift"
    monkeypatch.setattr("os.write", full)
    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("os.replace", full)
    result = riftco("pretrain", text, "-o", output, *TINY)
    assert (result.exit_code, f"{output}: No space left on device; free some space" in result.output) == (
        2,
        True,
    )
    left = [path for path in tmp_path.glob("*x.rift*") if path.is_file()]
    assert left + list(tmp_path.glob(".x.rift*")) == []  # but for the folder from which it goes on


def test_a_finished_run_tells_of_unfinished_ones_in_its_folder_and_leaves_them(
    text: Path, tmp_path: Path
) -> None:
    state = tmp_path / "x.rift.run" / "0123456789abcdef" / "000000000001.riftckpt"
    state.parent.mkdir(parents=True)
    state.write_bytes(bytes(3 << 20))
    said = riftco("pretrain", text, "-o", tmp_path / "x.rift", *TINY, "-s", "checkpoint_steps=1").output
    assert f"{tmp_path / 'x.rift.run'} also keeps 1 unfinished run of other settings" in said
    assert "3.0 MiB" in said
    assert state.exists()
    assert "keeps" not in riftco("pretrain", text, "-o", tmp_path / "y.rift", *TINY).output


def test_a_power_loss_after_the_first_checkpoint_leaves_one_or_the_bundle(text: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    recorder, disk = Recorder(place), Disk()
    with recorder.recording():
        result = riftco(
            "pretrain", text, "-o", place / "x.rift", *TINY, "-s", "checkpoint_steps=1", "-s", "backend=cpu"
        )
    assert result.exit_code == 0, result.output
    done = recorder.operations
    renamed = [op.kind == "rename" and op.path.endswith(".riftckpt") for op in done].index(True)
    states: dict[frozenset[tuple[str, bytes | str]], State] = {}
    for number, operation in enumerate(done):
        disk.apply(operation)
        if number > renamed:  # the folder is synced too: from here on something has to be left
            states |= {frozenset(state.items()): state for state in disk.states(limit=16)}
    assert disk.current() == tree(place)
    assert len(states) > 50
    for number, state in enumerate(states.values()):
        left = tmp_path / str(number)
        left.mkdir()
        plant(state, left)
        assert can_go_on(left), f"state {number} has neither"


def can_go_on(place: Path) -> bool:
    """Whether a folder holds the whole bundle, or an intact resume point to make it from."""
    try:
        ModelBundle.load(place / "x.rift")
    except (FileNotFoundError, ArtifactError):
        folders = {path.parent for path in place.glob("x.rift.run/*/*.riftckpt")}
        return any(list(Workspace(folder).points(lambda *_: None)) for folder in folders)
    return True


def test_a_text_too_short_for_the_context_says_so(text: Path, tmp_path: Path) -> None:
    result = riftco("pretrain", text, "-o", tmp_path / "x.rift", "-s", "context_size=5000")
    assert (result.exit_code, "5001" in result.output) == (2, True)
    assert list(tmp_path.iterdir()) == [text]  # no folder of a run that never began


def test_the_installed_command_runs() -> None:
    script = Path(sys.executable).with_name("riftco")
    if not script.exists():
        pytest.skip("the project is not installed in this environment")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "pipeline" in subprocess.run([script, "run", "--help"], capture_output=True, text=True).stdout
    assert "served" in result.stdout
