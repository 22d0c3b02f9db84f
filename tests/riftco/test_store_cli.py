"""`riftco store`, `lineage`, `why` and `diff` as a person at a terminal or a script sees them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from artifacts import ModelConfig, Ref, StepRecord, Store, TrainingCheckpoint, step_key
from riftco.cli import app
from tests.artifacts.bundles import small_bundle
from tests.artifacts.checkpoints import small_checkpoint

WIDE = {"feed_forward_width": 2}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A text, and a model trained on it: the run `demo`."""
    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "store"))
    store = Store.open(durability="none")
    text = store.put_bytes("text", b"once upon a time")
    train(store, small_bundle(1), text, steps=5)
    return store


def train(store: Store, bundle, text: Ref, steps: int) -> Ref:
    recipe = {"corpus": {"kind": "text", "digest": text.digest}, "config": {"steps": steps}}
    key = step_key("train", 1, recipe)
    record = StepRecord("train", 1, recipe, {"bundle": store.put_bundle(bundle)}, 1.5)
    store.name_run("demo", "train", key, store.remember(key, record))
    return record.results["bundle"]


def riftco(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def parsed(*arguments: object, code: int = 0):
    return json.loads(riftco(*arguments, "--json", code=code).stdout)


def test_ls_lists_tags_runs_and_the_size(store):
    store.set_tag("best", store.resolve("demo/train"), after=None)
    output = riftco("store", "ls").output
    assert "demo/train/bundle" in output
    assert "best" in output
    assert "2 objects" in output
    listed = parsed("store", "ls")
    assert listed["tags"]["best"] == listed["runs"]["demo"]["train"]["bundle"]
    assert listed["bytes"] == 16 + len(small_bundle(1).to_bytes())


def test_show_says_what_made_an_object_and_what_it_is_called(store):
    shown = parsed("store", "show", "demo/train")
    assert shown["artifact_ids"] == [small_bundle(1).artifact_id]
    assert shown["made_by"][0]["named"] == ["demo/train"]
    assert small_bundle(1).artifact_id in riftco("store", "show", "demo/train").output


def test_fsck_is_clean_or_names_the_damage_with_exit_code_2(store):
    assert "clean" in riftco("store", "fsck", "--full").output
    ref = store.resolve("demo/train")
    store.path(ref).chmod(0o644)
    store.path(ref).write_bytes(store.path(ref).read_bytes()[:-1] + b"?")
    assert f"damaged: {ref.digest}" in riftco("store", "fsck", "--full", code=2).output
    assert parsed("store", "fsck", "--full", code=2)["problems"][0]["code"] == "damaged"
    assert "damaged" in riftco("store", "verify", "demo", code=2).stderr


def test_verify_counts_what_is_intact(store):
    assert parsed("store", "verify", "demo", "demo/train") == {
        "demo": {"intact": 1},
        "demo/train": {"intact": 1},
    }


def test_gc_says_what_it_would_do_and_does_it(store):
    loose = store.put_bytes("text", b"loose")
    assert loose.digest in riftco("store", "gc", "--dry-run").output
    assert store.has(loose.digest)
    assert parsed("store", "gc")["objects"] == [loose.digest]
    assert not store.has(loose.digest)


def test_a_forgotten_run_is_freed(store):
    assert "would forget train" in riftco("store", "forget", "demo", "--dry-run").output
    assert store.runs() == ["demo"]
    riftco("store", "forget", "demo")
    output = riftco("store", "gc", "--unnamed").output
    assert "2 unnamed references younger than a day kept" in output
    assert "0 references forgotten" in output
    for name in store.reference_names():
        os.utime(store.root / "refs" / name, (0, 0))
    assert len(parsed("store", "gc", "--unnamed")["objects"]) == 2
    assert "no run is called" in riftco("store", "forget", "demo", code=2).stderr


def test_a_tag_is_set_shown_moved_and_removed(store):
    text = next(ref for ref in store.run_stages("demo")["train"].record.inputs().values())
    riftco("store", "tag", "best", "demo/train", "--dry-run")
    assert store.tags() == {}
    riftco("store", "tag", "best", "demo/train", "--expect", "none")
    assert store.resolve("best").kind == "bundle"
    assert store.resolve("best").digest in riftco("store", "tag", "best").output
    assert "means" in riftco("store", "tag", "best", text.digest, "--expect", "none", code=2).stderr
    moved = parsed("store", "tag", "best", text.digest, "--expect", "demo/train")
    assert moved["after"] == text.digest
    assert parsed("store", "tag", "best", "--remove")["after"] is None
    assert parsed("store", "tag") == {}
    assert "no tag is called" in riftco("store", "tag", "best", code=2).stderr


def test_what_a_tag_is_expected_to_mean_is_told_by_its_digest(store, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    digest = riftco("store", "put", tmp_path / "notes.txt", "--kind", "notes", "--tag", "a").output.strip()
    riftco("store", "put", tmp_path / "notes.txt", "--tag", "b")
    riftco("store", "tag", "b", "demo/train", "--expect", digest)
    assert store.tags()["b"] == store.resolve("demo/train")


def test_a_digest_in_quarantine_can_be_named_again(store, tmp_path):
    loose = store.put_bytes("text", b"loose")
    riftco("store", "gc")
    riftco("store", "get", loose.digest[:8], tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"loose"
    riftco("store", "tag", "again", loose.digest)
    assert store.has(loose.digest)


def test_get_writes_to_standard_output_if_asked_and_replaces_no_open_file(store, tmp_path):
    digest = store.put_bytes("text", b"some \xff bytes").digest
    assert riftco("store", "get", digest, "-").stdout_bytes == b"some \xff bytes"
    os.mkfifo(tmp_path / "pipe")
    for output in ("/dev/stdout", tmp_path / "pipe"):
        said = riftco("store", "get", digest, output, code=2).stderr
        assert str(output) in said
        assert f"riftco store get {digest} -" in said
    assert "/dev/stdout" in riftco("store", "export", "/dev/stdout", code=2).stderr


def test_names_in_a_list_are_whole_however_long(store):
    long = "n" * 120
    store.set_tag(long, store.resolve("demo/train"), after=None)
    assert long in riftco("store", "ls").output


def test_a_tag_that_would_hide_a_run_is_refused(store, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    before = store.digests()
    for arguments in (("tag", "demo", "demo/train"), ("put", tmp_path / "notes.txt", "--tag", "demo")):
        said = riftco("store", *arguments, code=2).stderr
        assert "a run is called demo, and the tag would hide it; give the tag another name" in said
    assert (store.tags(), store.digests()) == ({}, before)


def test_files_go_in_and_come_out_unchanged(store, tmp_path):
    source, bundle = tmp_path / "source.txt", small_bundle(2).save(tmp_path / "model.rift")
    source.write_bytes(b"some text")
    digest = riftco("store", "put", source, "--kind", "text", "--tag", "raw").output.strip()
    riftco("store", "get", "raw", tmp_path / "copy.txt")
    assert (tmp_path / "copy.txt").read_bytes() == b"some text"
    assert store.resolve(digest).kind == "text"
    riftco("store", "put", bundle)
    riftco("store", "get", small_bundle(2).artifact_id, tmp_path / "copy.rift")
    assert (tmp_path / "copy.rift").read_bytes() == bundle.read_bytes()


def test_an_archive_and_a_folder_carry_a_run_to_another_store(store, tmp_path, monkeypatch):
    riftco("store", "export", tmp_path / "demo.tar", "demo")
    pushed = parsed("store", "push", f"file://{tmp_path}/remote", "demo")
    assert (pushed["objects"], pushed["references"]) == (2, 3)
    assert parsed("store", "push", f"file://{tmp_path}/remote", "demo")["objects"] == 0
    for name, command in (
        ("imported", ("import", tmp_path / "demo.tar")),
        ("pulled", ("pull", f"file://{tmp_path}/remote")),
    ):
        monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / name))
        riftco("store", *command)
        assert "clean" in riftco("store", "fsck", "--full").output
        assert Store.open().resolve("demo/train") == store.resolve("demo/train")


def test_lineage_goes_down_to_the_data(store):
    text = next(iter(store.run_stages("demo")["train"].record.inputs().values()))
    output = riftco("lineage", "demo/train").output
    assert "train" in output
    assert f"corpus: text {text.digest[:12]}" in output
    diagram = riftco("lineage", "demo/train", "--mermaid").output
    assert diagram.startswith("flowchart LR\n")
    key = store.run_stages("demo")["train"].key
    assert f"o{text.digest[:12]} --> s{key[:12]}" in diagram
    assert f"s{key[:12]} --> o{store.resolve('demo/train').digest[:12]}" in diagram
    origins = parsed("lineage", "demo/train")
    assert [origin["kind"] for origin in origins] == ["bundle", "text"]


def test_why_names_the_field_that_changed(store):
    assert "one recipe only" in riftco("why", "demo/train").output
    other = store.put_bytes("text", b"twice upon a time")
    train(store, small_bundle(2), other, steps=6)
    output = riftco("why", "demo/train").output
    assert "config.steps: 5 -> 6\n" in output
    assert "corpus.digest: " in output
    assert len(output.splitlines()) == 2
    changed = parsed("why", "demo/train")["changes"]
    assert {"field": "config.steps", "before": 5, "after": 6} in changed
    (store.root / "refs" / "steps" / parsed("why", "demo/train")["previous"]).unlink()
    assert parsed("why", "demo/train")["changes"] is None
    assert "no longer in the store" in riftco("why", "demo/train").output
    assert "demo/train" in riftco("why", "demo/tain", code=2).stderr


def test_diff_measures_tensors_and_lists_fields(store, tmp_path):
    small_bundle(2).save(tmp_path / "other.rift")
    difference = parsed("diff", "demo/train", tmp_path / "other.rift")
    assert difference["tensors"]
    assert difference["tensor_count"] == len(small_bundle(1).parameters)
    assert "tensors differ" in riftco("diff", "demo/train", tmp_path / "other.rift").output
    assert "0 of" in riftco("diff", "demo/train", "demo/train").output


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc", "fsck", "push", "pull", "tag", "export"])
def test_every_command_explains_itself(command):
    assert "Usage" in riftco("store", command, "--help").output


def test_a_value_that_one_recipe_lacks_is_left_out_of_its_side(store):
    text = store.put_bytes("text", b"once upon a time")
    recipe = {"corpus": {"kind": "text", "digest": text.digest}, "seed": None}
    key = step_key("train", 1, recipe)
    record = StepRecord("train", 1, recipe, {"text": text}, 1.0)
    store.name_run("demo", "train", key, store.remember(key, record))
    assert parsed("why", "demo/train")["changes"] == [
        {"field": "config", "before": {"steps": 5}},
        {"field": "seed", "after": None},
    ]
    assert "seed: (absent) -> null" in riftco("why", "demo/train").output


def test_tensors_of_other_shapes_and_from_zero_are_said_in_words_and_null(store, tmp_path):
    first, other = small_bundle(1), small_bundle(2)
    zero = small_bundle(1, weights=np.zeros_like(first.weights))
    wide = ModelConfig(**{name: getattr(first.config, name) for name in first.config.__slots__} | WIDE)
    specs = wide.parameter_specs()
    weights = np.zeros(sum(spec.count for spec in specs), np.float32)
    paths = [
        zero.save(tmp_path / "zero.rift"),
        other.save(tmp_path / "other.rift"),
        small_bundle(1, config=wide, parameters=specs, weights=weights).save(tmp_path / "wide.rift"),
    ]
    difference = json.loads(riftco("diff", *paths[:2], "--json").stdout, parse_constant=pytest.fail)
    assert {tensor["relative"] for tensor in difference["tensors"].values()} == {None}
    assert "from zero" in riftco("diff", *paths[:2]).output
    difference = json.loads(riftco("diff", *paths[1:], "--json").stdout, parse_constant=pytest.fail)
    assert None in {tensor["norm"] for tensor in difference["tensors"].values()}
    assert "other shape" in riftco("diff", *paths[1:]).output


def spoil(store: Store, name: str) -> None:
    path = store.root / "refs" / name
    path.chmod(0o644)
    path.write_bytes(b"{")


def test_verify_checks_every_name_and_reports_each(store):
    spoil(store, "runs/demo/train")
    good = next(ref for ref in store.artifacts().values()).digest
    result = riftco("store", "verify", "demo", "nobody", good, code=2)
    assert f"{good}: 1 intact" in result.stdout
    assert "runs/demo/train is damaged" in result.stderr
    assert "nobody" in result.stderr
    said = parsed("store", "verify", "demo", "nobody", good, code=2)
    assert said[good] == {"intact": 1}
    assert (said["demo"]["error"], said["nobody"]["error"]) == ("damaged-reference", "unknown")
    result = riftco("verify", "demo", good, code=2)
    assert f"{good}: 1 intact" in result.stdout
    assert "runs/demo/train is damaged" in result.stderr


def test_a_checkpoint_in_a_file_is_told_from_a_model(store, tmp_path):
    path = small_checkpoint(global_step=7).save(tmp_path / "a.riftckpt")
    checkpoint = TrainingCheckpoint.load(path)
    said = riftco("verify", path, small_bundle(1).save(tmp_path / "a.rift")).output
    assert said.splitlines() == [
        f"{path}: intact, checkpoint {checkpoint.checkpoint_id}",
        f"{tmp_path / 'a.rift'}: intact, artifact {small_bundle(1).artifact_id}",
    ]
    shown = json.loads(riftco("show", path).output)
    assert (shown["checkpoint_id"], shown["global_step"]) == (checkpoint.checkpoint_id, 7)
    for command in (("generate", path, "x"), ("serve", path), ("diff", path, path)):
        assert f"{path}: is a checkpoint of a training, not a model; " in riftco(*command, code=2).stderr
    path.write_bytes(path.read_bytes()[:-1])
    said = riftco("verify", path, code=2).stderr
    assert said.count(str(path)) == 1
    assert "where its manifest asks for" in said


def test_small_results_and_scores_of_a_stage_are_shown_with_their_numbers(store):
    scores = store.put_bytes("scores", b'{"bits_per_byte":1.25}')
    long = store.put_bytes("scores", b'{"x":"%s"}' % bytes(5_000).replace(b"\0", b"y"))
    bundle = store.resolve("demo/train")
    for stage, results in (("scored", {"bundle": bundle, "scores": scores}), ("long", {"scores": long})):
        key = step_key(stage, 1, {})
        store.name_run("demo", stage, key, store.remember(key, StepRecord(stage, 1, {}, results, 1.0)))
    assert '\n{\n  "bits_per_byte": 1.25\n}\n' in riftco("show", "demo/scored/scores").output
    assert parsed("store", "show", "demo/scored/scores")["content"] == {"bits_per_byte": 1.25}
    assert "yyy" not in riftco("show", "demo/long/scores").output
    assert "\n    bits_per_byte 1.25\n" in riftco("show", "demo").output
    assert json.loads(riftco("show", "demo/scored").output)["scores"] == {"bits_per_byte": 1.25}
    assert "scores" not in json.loads(riftco("show", "demo/train").output)
    store.path(scores).unlink()
    assert "bits_per_byte" not in riftco("show", "demo").output  # a list is no check


def test_verify_of_what_has_nothing_to_check_is_an_error(store):
    key = step_key("idle", 1, {})
    store.name_run("empty", "idle", key, store.remember(key, StepRecord("idle", 1, {}, {}, 0.0)))
    assert "empty" in riftco("store", "verify", "empty", code=2).stderr


def test_verify_reads_bundles_and_checkpoints(store, tmp_path):
    for kind in ("bundle", "checkpoint"):
        store.set_tag(kind, store.put_bytes(kind, b"hashes to its name"), after=None)
        store.remember(
            step_key(kind, 1, {}), StepRecord(kind, 1, {}, {"x": store.put_bytes(kind, b"no")}, 0.0)
        )
        riftco("store", "verify", kind, code=2)
    path = small_checkpoint().save(tmp_path / "x.riftckpt")
    digest = riftco("store", "put", path).output.strip()
    assert store.load_checkpoint(store.resolve(small_checkpoint().checkpoint_id)) == small_checkpoint()
    assert parsed("store", "verify", digest) == {digest: {"intact": 1}}
    for suffix in ("x.rift", "x.riftckpt"):
        assert "--kind" in riftco("store", "put", tmp_path / suffix, "--kind", "text", code=2).stderr


def test_a_damaged_or_stray_tag_blocks_nobody_and_is_mended_by_force(store):
    store.set_tag("bad", store.resolve("demo/train"), after=None)
    spoil(store, "tags/bad")
    (store.root / "refs" / "tags" / "no name~").write_text("x")
    riftco("store", "show", "demo/train")
    riftco("store", "tag", "best", "demo/train")
    listed = riftco("store", "ls", code=2)
    assert "demo/train/bundle" in listed.stdout
    assert "tags/bad" in listed.stderr
    assert parsed("store", "ls", code=2)["damaged"] == ["tags/bad"]
    for name in (("bad",), ("bad", "demo/train"), ("bad", "--remove")):
        assert "tags/bad" in riftco("store", "tag", *name, code=2).stderr
    riftco("store", "tag", "bad", "demo/train", "--force")
    assert store.tags().keys() == {"bad", "best"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--remove",), "name of a tag"),
        (("absent", "--remove"), "no tag is called 'absent'"),
        (("best", "demo/train", "--remove"), "one of both"),
        (("best", "demo/train", "--expect", ""), "--expect ''"),
        (("best", "--expect", "none"), "--expect"),
    ],
)
def test_contradictory_arguments_of_a_tag_are_refused(store, arguments, word):
    store.set_tag("best", store.resolve("demo/train"), after=None)
    before = store.tag("best")
    assert word in riftco("store", "tag", *arguments, code=2).stderr
    assert store.tag("best") == before


LOOKING = [
    ("store", "ls"),
    ("store", "show", "demo"),
    ("store", "verify", "demo"),
    ("store", "fsck"),
    ("store", "gc"),
    ("store", "forget", "demo"),
    ("store", "tag"),
    ("store", "tag", "best", "demo"),
    ("store", "get", "demo", "file"),
    ("store", "export", "file"),
    ("store", "push", "memory://nowhere"),
    ("lineage", "demo"),
    ("why", "demo/train"),
    ("diff", "demo/train", "demo/train"),
    ("show",),
    ("verify", "demo"),
    ("generate", "demo/train", "x"),
]


@pytest.mark.parametrize("command", LOOKING, ids=lambda command: "-".join(command[:3]))
def test_commands_that_look_make_no_store(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "absent"))
    message = riftco(*command, code=2).stderr
    assert str(tmp_path / "absent") in message
    assert "RIFTCO_STORE" in message
    assert list(tmp_path.iterdir()) == []


def test_a_dry_pull_says_what_it_would_replace_and_makes_nothing(store, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/remote"
    riftco("store", "push", url)
    train(store, small_bundle(2), store.put_bytes("text", b"other"), steps=7)
    output = riftco("store", "pull", url, "--dry-run").output
    assert "demo/train would be replaced" in output
    assert "runs/demo/train\n" in output
    assert parsed("store", "pull", url, "-n")["replaced"] == ["demo/train"]
    assert store.load_bundle(store.resolve("demo/train")) == small_bundle(2)
    assert "demo/train was replaced" in riftco("store", "pull", url).output
    riftco("store", "export", tmp_path / "demo.tar")
    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "absent"))
    assert parsed("store", "pull", url, "--dry-run")["objects"] == 2
    assert len(parsed("store", "import", tmp_path / "demo.tar", "--dry-run")["copied"]) >= 5
    assert not (tmp_path / "absent").exists()


def test_a_dry_push_says_what_it_would_replace_and_makes_nothing(store, tmp_path):
    url = f"file://{tmp_path}/remote"
    assert parsed("store", "push", url, "--dry-run")["objects"] == 2
    assert not (tmp_path / "remote").exists()
    riftco("store", "push", url)
    train(store, small_bundle(2), store.put_bytes("text", b"other"), steps=7)
    assert "demo/train would be replaced" in riftco("store", "push", url, "-n").output
    assert "demo/train was replaced" in riftco("store", "push", url).output


def test_a_push_of_an_unknown_name_makes_no_store(store, tmp_path):
    assert "nosuch" in riftco("store", "push", f"file://{tmp_path}/remote", "nosuch", code=2).stderr
    assert not (tmp_path / "remote").exists()


def test_a_tag_moved_in_two_places_is_decided_by_force(store, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/remote"
    riftco("store", "tag", "best", "demo/train")
    riftco("store", "push", url)
    text = store.put_bytes("text", b"once upon a time")
    riftco("store", "tag", "best", text.digest)
    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "other"))
    riftco("store", "pull", url)
    riftco("store", "tag", "best", "--remove")
    riftco("store", "push", url)
    monkeypatch.setenv("RIFTCO_STORE", str(store.root))
    for command in ("push", "pull"):
        assert "--force" in riftco("store", command, url, code=2).stderr
    riftco("store", "push", url, "--force")
    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "other"))
    riftco("store", "pull", url)
    assert Store.open().resolve("best").digest == text.digest


def test_names_are_shown_as_they_are_and_a_tag_goes_before_a_run(store):
    key = step_key("[red]x", 1, {})
    record = StepRecord("[red]x", 1, {}, {"text": store.put_bytes("text", b"once")}, 1.0)
    store.name_run("markup", "x", key, store.remember(key, record))
    assert "[red]x" in riftco("lineage", "markup/x").output
    store.set_tag("demo", record.results["text"], after=None)
    assert riftco("show", "demo").output == riftco("store", "show", "demo").output
    assert record.results["text"].digest in riftco("show", "demo").output
    assert "demo/train: bundle" in riftco("show", "runs/demo").output


def test_the_days_of_the_quarantine_are_bounded(store):
    riftco("store", "gc", "--keep-days", 36501, code=2)
    riftco("store", "gc", "--keep-days", 36500)
    store.put_bytes("text", b"loose")
    assert len(parsed("store", "gc", "--keep-days", 0)["purged"]) == 1
