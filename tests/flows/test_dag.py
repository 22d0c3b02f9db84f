"""The whole DAG in one process, without Prefect: what it makes, what it skips, what it does after damage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from artifacts import ModelBundle, Store
from flows.dag import Sources, finetune_dag, pipeline_dag, pretrain_dag
from riftco.config import FinetuneFlowConfig, PipelineConfig, PretrainFlowConfig
from riftco.errors import InputError
from tasks.call import Results
from tasks.plan import PlanRunner
from tasks.runner import PlainRunner
from tests.tiny import tiny_pipeline

STAGES = [
    "prepare-corpus",
    "prepare-instructions",
    "fit-tokenizer",
    "check-tuning",
    "check-rank-sweep",
    "pretrain",
    "sample-stories",
    "post-train",
    "tune-rank-1",
    "tune-rank-2",
    "select-rank",
    "answer-pretrained",
    "answer-tuned",
    "answer-best-rank",
    "check-serving",
    "report",
]


def _run(store: Store, config: PipelineConfig) -> Results:
    with PlainRunner(store, config.name):
        return pipeline_dag(config, Sources.read(config, store, put=True))


def _statuses(store: Store, config: PipelineConfig) -> dict[str, str]:
    with PlanRunner(store, config.name) as runner:
        pipeline_dag(config, Sources.read(config, store, put=False))
    return {stage.stage: stage.status for stage in runner.stages}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Results]:
    store = Store.open(tmp_path_factory.mktemp("store"), durability="none")
    return store, _run(store, tiny_pipeline())


def _artifact_ids(store: Store) -> dict[str, str]:
    stages = store.run_stages("tiny")
    refs = {name: stage.record.results.get("bundle") for name, stage in stages.items()}
    return {name: store.load_bundle(ref).artifact_id for name, ref in refs.items() if ref}


def test_every_stage_leaves_a_named_result(finished: tuple[Store, Results]) -> None:
    store, _ = finished
    assert sorted(store.run_stages("tiny")) == sorted(STAGES)
    base, tuned = (store.load_bundle(store.resolve(f"tiny/{name}")) for name in ("pretrain", "post-train"))
    assert tuned.parent_artifact_id == base.artifact_id
    best = store.load_bundle(store.resolve("tiny/select-rank"))
    assert best.metadata["fine_tuning_method"] == "lora"


def test_the_report_tells_what_the_run_found(finished: tuple[Store, Results]) -> None:
    store, results = finished
    text = store.read_bytes(results["report"]).decode()
    base = store.load_bundle(store.resolve("tiny/pretrain"))
    scores = json.loads(store.read_bytes(store.resolve("tiny/pretrain/scores")))
    facts = json.loads(store.read_bytes(store.resolve("tiny/prepare-corpus/facts")))
    assert f"{scores['bits_per_byte']:.4f} bits per byte" in text
    assert f"{facts['entropy_floor']:.4f} bits per byte" in text
    assert base.artifact_id in text
    assert store.read_bytes(results["plot"]).startswith(b"\x89PNG")


def test_a_second_run_makes_nothing_new(finished: tuple[Store, Results]) -> None:
    store, results = finished
    objects = store.digests()
    assert set(_statuses(store, tiny_pipeline()).values()) == {"cached"}
    assert _run(store, tiny_pipeline()) == results
    assert store.digests() == objects


def test_a_changed_setting_runs_only_what_depends_on_it(finished: tuple[Store, Results]) -> None:
    store, _ = finished
    statuses = _statuses(store, tiny_pipeline("post_training.steps=3"))
    changed = {stage for stage, status in statuses.items() if status != "cached"}
    assert changed == {"post-train", "answer-tuned", "check-serving", "report"}
    assert statuses["post-train"] == "stale"
    statuses = _statuses(store, tiny_pipeline("rank_sweep.ranks=[2, 3]"))
    assert statuses.pop("check-rank-sweep") == "stale"
    assert set(statuses.values()) == {"cached", "missing", "waiting"}


def test_a_damaged_result_is_made_again_with_the_same_id(tmp_path: Path) -> None:
    store = Store.open(tmp_path, durability="none")
    config = tiny_pipeline()
    _run(store, config)
    ids, path = _artifact_ids(store), store.path(store.resolve("tiny/pretrain"))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-7])
    assert _statuses(store, config)["pretrain"] == "damaged"
    _run(store, config)
    assert _artifact_ids(store) == ids
    assert ModelBundle.load(path).artifact_id == ids["pretrain"]


KILLED = """
from artifacts import Store
from flows.dag import Sources, pipeline_dag
from tasks.runner import PlainRunner
from tests.tiny import tiny_pipeline
config, store = tiny_pipeline(), Store.open()
with PlainRunner(store, config.name):
    pipeline_dag(config, Sources.read(config, store, put=True))
"""


@pytest.mark.parametrize("stages_before_the_kill", [1, 4, 9])
def test_a_killed_run_goes_on_and_ends_with_the_same_artifacts(
    finished: tuple[Store, Results], tmp_path: Path, stages_before_the_kill: int
) -> None:
    environment = os.environ | {"RIFTCO_STORE": str(tmp_path / "store")}
    child = subprocess.Popen([sys.executable, "-c", KILLED], env=environment, cwd=Path(__file__).parents[2])
    store = Store.open(tmp_path / "store")
    deadline = time.monotonic() + 120
    while len(store.run_stages("tiny")) < stages_before_the_kill and time.monotonic() < deadline:
        assert child.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = set(store.run_stages("tiny"))
    assert stages_before_the_kill <= len(done) < len(STAGES)
    assert {s for s, status in _statuses(store, tiny_pipeline()).items() if status == "cached"} >= done
    _run(store, tiny_pipeline())
    assert _artifact_ids(store) == _artifact_ids(finished[0])


def test_your_own_text_and_instructions(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [f"Part {i} of the tale: the river is {i} miles long and {i * 7} feet deep." for i in range(80)]
    (folder / "b.txt").write_text("\n\n".join(lines[40:]), encoding="utf-8")
    (folder / "a.txt").write_text("\n\n".join(lines[:40]), encoding="utf-8")
    records = [{"prompt": f"What is twice {i}?", "response": str(2 * i)} for i in range(60)]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tiny_pipeline(f"corpus.path={folder}", f"instructions.path={tasks}")
    store = Store.open(tmp_path / "store", durability="none")
    results = _run(store, config)
    assert "entropy floor" not in store.read_bytes(results["report"]).decode()
    folder.rename(tmp_path / "moved")  # a path is not part of a key, what is in the files is
    moved = tiny_pipeline(f"corpus.path={tmp_path / 'moved'}", f"instructions.path={tasks}")
    assert set(_statuses(store, moved).values()) == {"cached"}
    generator = (
        "corpus.stories=7",
        "corpus.events=[3]",
        "instructions.examples=7",
        "instructions.random_seed=7",
    )
    unused = tiny_pipeline(f"corpus.path={tmp_path / 'moved'}", f"instructions.path={tasks}", *generator)
    assert set(_statuses(store, unused).values()) == {"cached"}
    (tmp_path / "moved" / "b.txt").write_text("\n\n".join(lines[41:]), encoding="utf-8")
    assert _statuses(store, moved)["prepare-corpus"] == "stale"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text"),
        (b"\xff\xfe", "not UTF-8"),
        (b"one short line", "too few"),
        (b"a\n\nb\n\nc\n\nd", None),
    ],
)
def test_bad_text_is_an_input_error(tmp_path: Path, content: bytes, message: str | None) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    windows = ("pretraining.sampling_strategy=random_window", "pretraining.end_of_text=false")
    config = tiny_pipeline(f"corpus.path={path}", *windows)
    with pytest.raises(InputError, match=message):
        _run(Store.open(tmp_path / "store", durability="none"), config)


def test_pretraining_alone_shares_the_pipelines_corpus_and_ends_in_a_bundle_and_a_picture(
    finished: tuple[Store, Results],
) -> None:
    store, _ = finished
    whole = tiny_pipeline()
    config = PretrainFlowConfig(
        name="alone", corpus=whole.corpus, pretraining=whole.pretraining, evaluation=whole.evaluation
    )
    with PlanRunner(store, config.name) as runner:
        pretrain_dag(config, Sources.read(config, store, put=False))
    statuses = {stage.stage: stage.status for stage in runner.stages}
    assert statuses.pop("prepare-corpus") == "cached"
    assert statuses.keys() == {"fit-tokenizer", "pretrain", "sample-stories", "plot-loss"}
    with PlainRunner(store, config.name):
        results = pretrain_dag(config, Sources.read(config, store, put=True))
    assert store.load_bundle(results["bundle"]).stage == "pretraining"
    assert store.read_bytes(results["plot"]).startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_fine_tuning_starts_from_a_name_or_a_file_that_is_the_same(
    finished: tuple[Store, Results], tmp_path: Path, method: str
) -> None:
    store, _ = finished
    whole = tiny_pipeline(f"post_training.fine_tuning_method={method}", "post_training.optimizer=adamw")
    config = FinetuneFlowConfig(
        name=f"chat-{method}",
        base="tiny/pretrain",
        instructions=whole.instructions,
        post_training=whole.post_training,
        evaluation=whole.evaluation,
    )
    with PlainRunner(store, config.name):
        results = finetune_dag(config, Sources.read(config, store, put=True))
    bundle = store.load_bundle(results["bundle"])
    assert bundle.metadata["fine_tuning_method"] == method
    assert bundle.parent_artifact_id == store.load_bundle(store.resolve("tiny/pretrain")).artifact_id
    path = store.get(store.resolve("tiny/pretrain"), tmp_path / "base.rift")
    from_file = config.model_copy(update={"base": str(path)})
    with PlanRunner(store, config.name) as runner:
        finetune_dag(from_file, Sources.read(from_file, store, put=False))
    assert {stage.status for stage in runner.stages} == {"cached"}
    table = store.root.parent / "tracking" / store.root.name / config.name / "post-train" / "metrics.parquet"
    phases = parquet.read_table(table)["phase"].to_pylist()
    assert phases == ["validation", "train", "train", "validation"]
