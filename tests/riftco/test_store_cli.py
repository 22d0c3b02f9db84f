"""`riftco store`, `lineage`, `why` and `diff` as a person at a terminal or a script sees them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from artifacts import Ref, StepRecord, Store, step_key
from riftco.cli import app
from tests.artifacts.bundles import small_bundle


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
    assert moved["after"] == text.digest[:12]
    riftco("store", "tag", "best", "--remove")
    assert parsed("store", "tag") == {}
    assert "no tag is called" in riftco("store", "tag", "best", code=2).stderr


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
    assert ["config.steps", 5, 6] in parsed("why", "demo/train")["changes"]
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
