"""Tags: names that move by compare-and-swap and never forget that they moved."""

import pytest

from artifacts import Ref, Store, StoreError
from artifacts.records import Tag, decode_tag, encode_tag, moves_forward, seal


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
    assert store.tag("best") == removed == Tag(None, 2, (one.digest,))
    assert store.set_tag("best", one, after=removed) == Tag(one, 3, (None, one.digest))


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


def moves(*refs: Ref | None) -> Tag:
    """A tag that meant these one after the other."""
    tag = Tag(refs[0], 1)
    for ref in refs[1:]:
        tag = tag.moved(ref, tag.sequence + 1)
    return tag


@pytest.mark.parametrize(
    ("old", "new", "forward"),
    [
        (None, moves(A), True),
        (moves(A), moves(A), False),
        (moves(A), moves(A, B), True),
        (moves(A), moves(A, B, C), True),
        (moves(A, B), moves(A), False),
        (moves(A, B, C), moves(A), False),
        (moves(A, None), moves(A, None, B), True),
        (moves(A), moves(A, *([B] * 64)), True),
        (moves(A), moves(Ref("notes", A.digest)), False),
        (moves(A, B), moves(C, B), False),
    ],
)
def test_a_copy_of_a_tag_moves_on_but_never_back(old, new, forward):
    assert moves_forward("best", old, new) is forward


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (moves(A), moves(B)),
        (moves(A), moves(B, C)),
        (moves(A, B), moves(A, C, B)),
        (moves(A, B), moves(A, C, A, C, C)),  # several moves further, and never where the other is
        (moves(A), moves(B, *([A] * 2))),
        (moves(A), moves(A, *([B] * 65))),  # longer ago than it remembers
    ],
)
def test_copies_that_moved_apart_are_told_apart_in_both_directions(one, other):
    assert code_of(moves_forward, "best", one, other) == "tag-diverged"
    assert code_of(moves_forward, "best", other, one) == "tag-diverged"


def test_a_tag_that_moved_apart_is_set_anew_from_the_other_copy(store):
    one, two = (store.put_bytes("text", data) for data in (b"one", b"two"))
    here = store.set_tag("best", two, after=store.set_tag("best", one, after=None))
    there = moves(A)
    anew = store.set_tag("best", two, after=here, apart=there)
    assert (anew.ref, anew.sequence) == (two, 3)
    assert moves_forward("best", there, anew)


def test_a_tag_remembers_its_last_64_moves(store):
    refs = [store.put_bytes("text", b"%d" % number) for number in range(70)]
    tag = None
    for ref in refs:
        tag = store.set_tag("best", ref, after=tag)
    assert tag is not None
    assert tag.history == tuple(ref.digest for ref in refs[-2:4:-1])
    assert store.tag("best") == tag


def test_a_tag_that_claims_a_huge_number_of_moves_costs_no_memory():
    assert Tag(A, 1).moved(B, 1 << 60) == Tag(B, 1 << 60, (A.digest,) * 64)


def test_a_tag_is_read_back():
    for tag in (moves(A, B, A), moves(A, None), moves(*([A, B] * 40))):
        assert decode_tag(encode_tag(tag, lambda ref: 5), str) == tag


TAG = {"kind": "text", "digest": A.digest, "size": 1, "history": [B.digest], "seq": 2}


@pytest.mark.parametrize(
    "changed",
    [
        {"seq": 0},
        {"seq": True},
        {"seq": 2.0},
        {"seq": 3},
        {"history": []},
        {"history": None},
        {"history": ["x"]},
        {"size": -1},
        {"size": "1"},
        {"kind": "a/b"},
        {"digest": None},
        {"digest": "../x"},
        {"more": 1},
    ],
)
def test_a_tag_of_another_form_is_refused(changed):
    assert decode_tag(seal(TAG), str).sequence == 2
    assert code_of(decode_tag, seal(TAG | changed), str) == "damaged-reference"


def test_a_damaged_tag_stands_in_nobodys_way_and_is_set_again_by_force(store):
    one, two = (store.put_bytes("text", data) for data in (b"one", b"two"))
    store.set_tag("good", one, after=None)
    store.set_tag("bad", one, after=None)
    path = store.root / "refs" / "tags" / "bad"
    path.chmod(0o644)
    path.write_bytes(b"{")
    (store.root / "refs" / "tags" / "no name~").write_text("x")
    (store.root / "refs" / "tags" / "folder").mkdir()
    assert store.tags() == {"good": one}
    assert store.resolve("good") == one
    for name in ("bad", "folder"):
        with pytest.raises(StoreError, match=f"tags/{name}.*--force") as caught:
            store.resolve(name)
        assert caught.value.code == "damaged-reference"
    assert code_of(store.set_tag, "bad", two, after=None) == "damaged-reference"
    store.set_tag("bad", two, after=None, force=True)
    assert store.tags() == {"good": one, "bad": two}
