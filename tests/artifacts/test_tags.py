"""Tags: names that move by compare-and-swap and never forget that they moved."""

import pytest

from artifacts import Ref, Store, StoreError
from artifacts.records import Tag, decode_tag, encode_tag, moves_forward


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "store", durability="none")


def code_of(call, *arguments, **options) -> str:
    with pytest.raises(StoreError) as caught:
        call(*arguments, **options)
    return caught.value.code


def test_a_tag_counts_its_moves_and_knows_where_it_was(store):
    one, two = (store.put_bytes("text", data) for data in (b"one", b"two"))
    assert store.tag("best") is None
    first = store.set_tag("best", one, after=None)
    second = store.set_tag("best", two, after=first)
    assert (first.ref, first.sequence, first.previous) == (one, 1, None)
    assert (second.ref, second.sequence, second.previous) == (two, 2, one.digest)
    assert store.tag("best") == second
    assert store.tags() == {"best": two}


def test_only_who_saw_the_last_move_can_make_the_next(store):
    one, two = (store.put_bytes("text", data) for data in (b"one", b"two"))
    first = store.set_tag("best", one, after=None)
    store.set_tag("best", two, after=first)
    assert code_of(store.set_tag, "best", one, after=first) == "tag-moved"
    assert code_of(store.set_tag, "best", one, after=None) == "tag-moved"
    assert code_of(store.set_tag, "new", one, after=first) == "tag-moved"
    assert store.tags() == {"best": two}


def test_a_removed_tag_means_nothing_but_goes_on_counting(store):
    one = store.put_bytes("text", b"one")
    first = store.set_tag("best", one, after=None)
    removed = store.set_tag("best", None, after=first)
    assert store.tags() == {}
    assert store.tag("best") == removed == Tag(None, 2, one.digest)
    assert store.set_tag("best", one, after=removed) == Tag(one, 3, None)


def test_a_tag_means_an_object_that_is_here(store):
    assert code_of(store.set_tag, "best", Ref("text", "0" * 64), after=None) == "missing"
    assert store.tag("best") is None


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b"])
def test_a_tag_must_be_a_plain_name(store, name):
    one = store.put_bytes("text", b"one")
    assert code_of(store.set_tag, name, one, after=None) == "bad-name"
    assert code_of(store.tag, name) == "bad-name"


def test_a_tag_resolves_before_an_id_of_the_same_digits(store):
    one, two = (store.put_bytes("text", data) for data in (b"one", b"two"))
    store.set_tag(one.digest[:8], two, after=None)
    assert store.resolve(one.digest[:8]) == two
    assert store.resolve(f"tags/{one.digest[:8]}") == two
    assert store.resolve(one.digest[:9]).digest == one.digest
    assert store.resolve(two.digest[:9]) == two  # of the tag's kind


def test_a_damaged_tag_is_an_error_and_never_a_guess(store):
    store.set_tag("best", store.put_bytes("text", b"one"), after=None)
    path = store.root / "refs" / "tags" / "best"
    data = path.read_bytes()
    path.chmod(0o644)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert code_of(store.tag, "best") == "damaged-reference"


A, B, C = (Ref("text", digit * 64) for digit in "abc")


@pytest.mark.parametrize(
    ("old", "new", "moves"),
    [
        (None, Tag(A, 1, None), True),
        (Tag(A, 1, None), Tag(A, 1, None), False),
        (Tag(A, 1, None), Tag(B, 2, A.digest), True),
        (Tag(A, 1, None), Tag(C, 3, B.digest), True),
        (Tag(B, 2, A.digest), Tag(A, 1, None), False),
        (Tag(None, 2, A.digest), Tag(B, 3, None), True),
    ],
)
def test_a_copy_of_a_tag_moves_on_but_never_back(old, new, moves):
    assert moves_forward("best", old, new) is moves


@pytest.mark.parametrize(
    ("old", "new"), [(Tag(A, 1, None), Tag(B, 1, None)), (Tag(A, 1, None), Tag(C, 2, B.digest))]
)
def test_copies_that_moved_apart_are_told_apart(old, new):
    assert code_of(moves_forward, "best", old, new) == "tag-diverged"


def test_a_tag_is_read_back():
    for tag in (Tag(A, 3, B.digest), Tag(None, 2, A.digest)):
        assert decode_tag(encode_tag(tag, lambda ref: 5), str) == tag
