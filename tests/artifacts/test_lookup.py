"""From what a person types to an object: names, ids, first digits, and help when there is no such thing."""

import hashlib

import pytest

from artifacts import ModelBundle, Ref, StepRecord, Store, StoreError, step_key
from tests.artifacts.bundles import small_bundle


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path, durability="none")


def finish(store: Store, run: str, stage: str, **results: Ref) -> str:
    key = step_key(stage, 1, {"run": run})
    record = StepRecord(stage, 1, {"run": run}, results, 0.5)
    store.name_run(run, stage, key, store.remember(key, record))
    return key


@pytest.fixture
def bundle() -> ModelBundle:
    return small_bundle()


@pytest.fixture
def demo(store, bundle) -> Store:
    text = store.put_bytes("text", b"stories")
    finish(store, "demo", "corpus", train=text, validation=store.put_bytes("text", b"more"))
    finish(
        store, "demo", "pretrain", metrics=store.put_bytes("metrics", b"{}"), model=store.put_bundle(bundle)
    )
    return store


def unknown(store: Store, text: str) -> str:
    with pytest.raises(StoreError) as caught:
        store.resolve(text)
    assert caught.value.code == "unknown"
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "runs/"])
def test_a_stage_means_its_bundle_or_else_its_first_result(demo, bundle, prefix):
    assert demo.load_bundle(demo.resolve(f"{prefix}demo/pretrain")) == bundle
    assert demo.read_bytes(demo.resolve(f"{prefix}demo/corpus")) == b"stories"


def test_a_result_is_found_by_its_own_name(demo):
    assert demo.read_bytes(demo.resolve("demo/corpus/validation")) == b"more"
    assert demo.resolve("runs/demo/pretrain/metrics").kind == "metrics"


def test_a_run_may_be_called_runs(demo):
    finish(demo, "runs", "corpus", text=demo.put_bytes("text", b"x"))
    assert demo.read_bytes(demo.resolve("runs/corpus")) == b"x"
    assert demo.read_bytes(demo.resolve("runs/runs/corpus")) == b"x"


@pytest.mark.parametrize("length", [6, 12, 63, 64])
def test_the_first_digits_of_an_artifact_id_or_digest_are_enough(demo, bundle, length):
    ref = demo.resolve("demo/pretrain")
    for digits in (bundle.artifact_id, ref.digest):
        found = demo.resolve(digits[:length])
        assert (found, found.uri) == (ref, ref.uri)
    assert demo.resolve(bundle.artifact_id[:length].upper()) == ref


def test_a_digest_has_the_kind_that_its_step_gave_it(demo):
    metrics = demo.resolve("demo/pretrain/metrics")
    assert demo.resolve(metrics.digest).kind == "metrics"
    nameless = demo.put_bytes("whatever", b"nobody mentions me")
    assert demo.resolve(nameless.digest[:10]).kind == "object"


def test_digits_of_several_objects_are_ambiguous(store):
    digests: dict[str, int] = {}
    number = 0
    while True:  # two objects whose digests share six digits; about 5,000 tries by the birthday bound
        digest = store_digest(number)
        if digest[:6] in digests:
            break
        digests[digest[:6]] = number
        number += 1
    first = store.put_bytes("text", str(digests[digest[:6]]).encode())
    second = store.put_bytes("text", str(number).encode())
    with pytest.raises(StoreError) as caught:
        store.resolve(digest[:6])
    assert caught.value.code == "ambiguous"
    assert first.digest in str(caught.value)
    assert second.digest in str(caught.value)
    length = next(n for n in range(7, 65) if first.digest[:n] != second.digest[:n])
    assert store.resolve(second.digest[:length]).digest == second.digest


def store_digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("demo/pretrian", "demo/pretrain"),
        ("runs/demo/pretrian", "demo/pretrain"),
        ("demo/pretrain/metric", "demo/pretrain/metrics"),
        ("demos/corpus", "demo/corpus"),
    ],
)
def test_a_misspelt_name_is_answered_with_near_ones(demo, text, hint):
    assert f"did you mean {hint}" in unknown(demo, text) or f"or {hint}" in unknown(demo, text)


@pytest.mark.parametrize("text", ["demo", "runs/demo"])
def test_a_run_where_one_object_is_needed_is_answered_with_its_stages(demo, text):
    message = "demo is a run; name one of its stages: demo/corpus, demo/pretrain"
    assert unknown(demo, text) == message


def test_misspelt_digits_are_answered_with_near_ones(demo, bundle):
    digits = bundle.artifact_id[:12]
    wrong = digits[:5] + ("0" if digits[5] != "0" else "1") + digits[6:]
    assert bundle.artifact_id in unknown(demo, wrong)


@pytest.mark.parametrize(
    "text", ["", "x", "x/y/z/w", "../../etc/passwd", "a\0b/c", "/", "demo/../demo/pretrain"]
)
def test_anything_else_is_unknown_and_the_runs_are_listed(demo, text):
    assert "demo" in unknown(demo, text)


def test_an_empty_store_says_that_it_has_no_runs(store):
    assert "runs here: none" in unknown(store, "demo/pretrain")


def test_fewer_than_six_digits_are_not_looked_up(demo, bundle):
    unknown(demo, bundle.artifact_id[:5])


def test_a_stage_without_results_is_unknown(store):
    finish(store, "demo", "empty")
    unknown(store, "demo/empty")


def test_a_tag_goes_before_a_run_of_the_same_name_everywhere(demo):
    text = demo.resolve("demo/corpus")
    assert demo.run_called("demo") == demo.run_called("runs/demo") == "demo"
    assert len(demo.objects_of("demo")) == 4
    demo.set_tag("demo", text, after=None)
    assert demo.resolve("demo") == text
    assert demo.objects_of("demo") == demo.objects_of("tags/demo") == [text]
    assert demo.run_called("demo") is None
    assert demo.run_called("runs/demo") == "demo"
    assert "tags/demo" in demo.select(["demo"])
    assert not any(name.startswith("runs/") for name in demo.select(["demo"]))
    assert {name for name in demo.select(["runs/demo"]) if name.startswith("runs/")} == {
        "runs/demo/corpus",
        "runs/demo/pretrain",
    }


def test_a_removed_tag_hides_no_run(demo):
    first = demo.set_tag("demo", demo.resolve("demo/corpus"), after=None)
    demo.set_tag("demo", None, after=first)
    assert demo.run_called("demo") == "demo"
    assert len(demo.objects_of("demo")) == 4
    assert "is a run; name one of its stages" in unknown(demo, "demo")
    assert "nothing in the store" in unknown(demo, "tags/demo")
    assert {"tags/demo", "runs/demo/corpus", "runs/demo/pretrain"} <= set(demo.select(["demo"]))


def test_a_run_is_not_an_object_even_if_its_only_stage_is_called_like_it(store):
    finish(store, "demo", "demo", text=store.put_bytes("text", b"x"))
    unknown(store, "demo")
    assert store.run_called("demo") == "demo"
    assert store.read_bytes(store.resolve("demo/demo")) == b"x"


def test_a_selection_takes_every_name_that_resolves(demo, bundle):
    ref = demo.resolve("demo/pretrain")
    artifact = f"artifacts/{bundle.artifact_id}"
    for text in ("demo/pretrain/metrics", bundle.artifact_id[:8], ref.digest, ref.digest[:8].upper()):
        chosen = demo.select([text])
        assert artifact in chosen
        assert any(name.startswith("steps/") for name in chosen)
        assert ("runs/demo/pretrain" in chosen) == ("/" in text)


def test_all_objects_of_a_stage_are_meant_the_main_one_first(demo, bundle):
    found = demo.objects_of("demo/pretrain")
    assert [ref.kind for ref in found] == ["bundle", "metrics"]
    assert demo.objects_of("demo/pretrain/metrics") == found[1:]
    assert demo.objects_of(bundle.artifact_id[:8]) == found[:1]


@pytest.mark.parametrize("text", ["demo", "demo/corpus", "demo/corpus/train", "runs/demo/corpus"])
def test_a_damaged_stage_is_named_and_never_overlooked(demo, text):
    path = demo.root / "refs" / "runs" / "demo" / "corpus"
    path.chmod(0o644)
    path.write_bytes(b"{")
    with pytest.raises(StoreError, match=r"runs/demo/corpus is damaged.*again") as caught:
        demo.objects_of(text)
    assert caught.value.code == "damaged-reference"
    assert demo.resolve("demo/pretrain").kind == "bundle"
