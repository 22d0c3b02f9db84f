"""Lineage: what made an object, what that was made from, and which references go together."""

import pytest

from artifacts import Ref, StepRecord, Store, StoreError, step_key
from artifacts.lineage import ABSENT, Lineage, changes
from tests.artifacts.bundles import small_bundle


@pytest.fixture
def store(tmp_path) -> Store:
    """raw -> read -> text -> train -> model (demo, tagged best); raw -> count -> number (other)."""
    store = Store.open(tmp_path / "store", durability="none")
    raw = store.put_bytes("source", b"raw")
    text = step(store, "demo", "read", {"raw": raw}, store.put_bytes("text", b"text"))
    model = step(store, "demo", "train", {"texts": [text], "steps": 5}, store.put_bundle(small_bundle()))
    step(store, "other", "count", {"raw": raw}, store.put_bytes("number", b"3"))
    store.set_tag("best", model, after=None)
    return store


def step(store: Store, run: str, name: str, arguments: dict, result: Ref) -> Ref:
    recipe = plain(arguments)
    key = step_key(name, 1, recipe)
    store.name_run(run, name, key, store.remember(key, StepRecord(name, 1, recipe, {"main": result}, 1.0)))
    return result


def plain(value):
    if isinstance(value, Ref):
        return {"kind": value.kind, "digest": value.digest}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_a_record_names_its_inputs_by_their_place(store):
    record = store.run_stages("demo")["train"].record
    assert record.inputs() == {"texts.0": store.resolve("demo/read")}


def test_upstream_is_everything_an_object_was_made_from(store):
    origins = Lineage(store).upstream([store.resolve("best")])
    assert [origin.ref.kind for origin in origins] == ["bundle", "text", "source"]
    assert [[made.step for made in origin.makers.values()] for origin in origins] == [["train"], ["read"], []]


def test_a_step_that_only_a_run_remembers_still_counts(store):
    key = store.run_stages("demo")["train"].key
    (store.root / "refs" / "steps" / key).unlink()
    lineage = Lineage(store)
    assert list(lineage.origin(store.resolve("best")).makers) == [key]
    assert lineage.names[key] == ["demo/train"]


@pytest.mark.parametrize("name", ["demo", "runs/demo", "demo/train", "best", "tags/best"])
def test_a_selection_holds_what_is_named_and_all_upstream_of_it(store, name):
    chosen = store.select([name])
    steps = {store.run_stages("demo")[stage].key for stage in ("read", "train")}
    artifact = f"artifacts/{small_bundle().artifact_id}"
    assert {found for found in chosen if found.startswith("steps/")} == {f"steps/{key}" for key in steps}
    assert artifact in chosen
    named = {found for found in chosen if found.startswith(("runs/", "tags/"))}
    if "best" in name:
        assert named == {"tags/best"}
    else:
        assert named == {"runs/demo/train"} | ({"runs/demo/read"} if name != "demo/train" else set())


def test_an_artifact_is_selected_by_its_id(store):
    chosen = store.select([small_bundle().artifact_id[:10]])
    assert [name.split("/")[0] for name in chosen] == ["artifacts", "steps", "steps"]


def test_without_names_everything_is_selected_in_the_order_of_writing(store):
    folders = [name.split("/")[0] for name in store.select()]
    assert folders == ["artifacts"] + ["steps"] * 3 + ["runs"] * 3 + ["tags"]


def test_an_unknown_name_is_an_error(store):
    with pytest.raises(StoreError) as caught:
        store.select(["demo/tain"])
    assert caught.value.code == "unknown"
    assert "demo, other" in str(caught.value)


def test_a_stage_remembers_the_recipe_before(store):
    before = store.run_stages("demo")["train"]
    assert before.previous is None
    text = store.resolve("demo/read")
    step(store, "demo", "train", {"texts": [text], "steps": 6}, store.put_bundle(small_bundle()))
    step(store, "demo", "train", {"texts": [text], "steps": 6}, store.put_bundle(small_bundle()))
    now = store.run_stages("demo")["train"]
    assert now.previous == before.key
    assert changes(before.record.recipe, now.record.recipe) == [("steps", 5, 6)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, [("a", 1, 1.0)]),
        ({"a": True}, {"a": 1}, [("a", True, 1)]),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3, 4]}}, [("a.b.1", 2, 3), ("a.b.2", ABSENT, 4)]),
        ({"a": 1}, {"b": 1}, [("a", 1, ABSENT), ("b", ABSENT, 1)]),
        ([], {}, [("", [], {})]),
    ],
)
def test_changes_go_down_to_the_field(before, after, expected):
    assert changes(before, after) == expected
