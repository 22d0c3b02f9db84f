"""Text from tokens' bytes: however these are cut, it is that of all at once, up to the first stop string."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from random import Random

import pytest

from riftco.serving.engine.text_assembler import TextAssembler
from tests.riftco.serving.engine.fake_model import cut

CHARACTERS = ("a", "b", "ab", "c", " ", "\n", "é", "€", "日", "🙂", "\u0301", "�", "\x00")
BYTES = (
    b"\xff",
    b"\xc3",
    b"\xe2\x82",
    b"\xf0\x9f",
    b"\x80",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80\x80",
)


def random_bytes(random: Random) -> bytes:
    pieces: list[bytes] = []
    for _ in range(random.randint(0, 14)):
        kind = random.random()
        if kind < 0.8:
            pieces.append(random.choice(CHARACTERS[: random.choice((3, 3, 13))]).encode())
        elif kind < 0.95:
            pieces.append(random.choice(BYTES))
        else:
            pieces.append(random.randbytes(1))
    return b"".join(pieces)


def random_stop(random: Random) -> str:
    return "".join(
        random.choice(CHARACTERS[: random.choice((2, 2, 8, 13))]) for _ in range(random.randint(1, 4))
    )


def random_split(random: Random, data: bytes) -> list[bytes]:
    chance = random.choice((0.1, 0.5, 1.0))
    cuts = [0, *(i for i in range(1, len(data)) if random.random() < chance), len(data)]
    return [data[begin:end] for begin, end in pairwise(cuts)]


def check(pieces: Sequence[bytes], stop: Sequence[str]) -> None:
    """The stream is the one-shot text, and gives each part as soon as it is certain, no sooner."""
    expected = cut(b"".join(pieces).decode("utf-8", "replace"), stop)
    assembler, decoder = TextAssembler(stop), getincrementaldecoder("utf-8")("replace")
    given, seen = "", ""
    for piece in pieces:
        given += assembler.push(piece)
        seen += decoder.decode(piece)
        stopped = any(string in seen for string in stop)
        assert assembler.stopped == stopped
        assert given == (cut(seen, stop) if stopped else seen[: len(seen) - maybe_begun(seen, stop)])
    given += assembler.finish()
    assert given == expected
    assert assembler.push(b"more") == "" or not assembler.stopped


def maybe_begun(text: str, stop: Iterable[str]) -> int:
    """How much of the text's end may turn out to be the beginning of a stop string."""
    return max((n for string in stop for n in range(len(string)) if text.endswith(string[:n])), default=0)


@pytest.mark.parametrize(
    "streams", [5_000, pytest.param(200_000, marks=pytest.mark.soak)], ids=["quick", "full"]
)
def test_a_stream_is_the_text_of_all_bytes_at_once(streams: int) -> None:
    for seed in range(streams):
        random = Random(seed)
        stop = [random_stop(random) for _ in range(random.choice((0, 1, 1, 2, 3)))]
        pieces = random_split(random, random_bytes(random))
        try:
            check(pieces, stop)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {pieces} with stop {stop}") from error


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Every way to cut the bytes of short data; of longer data, all into three parts or fewer, and singly."""
    places = range(1, len(data))
    counts = range(len(data)) if len(data) <= 8 else (0, 1, 2, len(data) - 1)
    for count in counts:
        for cuts in combinations(places, count):
            yield [data[begin:end] for begin, end in pairwise((0, *cuts, len(data)))]


def test_every_split_of_200_stop_strings() -> None:
    random = Random(0)
    for _ in range(200):
        stop = random_stop(random)
        before, after = random.choice(("", "a", "ab", "é")), random.choice(("", "b"))
        for pieces in splits(before.encode() + stop.encode() + after.encode()):
            check(pieces, (stop,))


def test_every_split_of_a_stop_string_that_does_not_come() -> None:
    random = Random(1)
    for _ in range(50):
        stop = random_stop(random) + "é"
        for pieces in splits(b"a" + stop.encode()[:-1]):
            check(pieces, (stop,))


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("xabcx", ("c", "abc"), "x"),  # completed by the same character: the longest
        ("xabcx", ("bc", "ab"), "x"),  # the first to be completed
        ("xabcx", ("abcd", "b"), "xa"),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("abc", ("abcd",), "abc"),
        ("a\n### User:b", ("\n### User:",), "a"),
        ("", ("a",), ""),
    ],
)
def test_which_stop_string_counts(text: str, stop: tuple[str, ...], left: str) -> None:
    check([text.encode()], stop)
    assembler = TextAssembler(stop)
    assert "".join([*(assembler.push(bytes([byte])) for byte in text.encode()), assembler.finish()]) == left


def test_after_a_stop_nothing_comes() -> None:
    assembler = TextAssembler(("b",))
    assert assembler.push(b"abc") == "a"
    assert assembler.stopped
    assert assembler.push(b"def") == ""
    assert assembler.finish() == ""


def test_finishing_twice_gives_nothing_twice() -> None:
    assembler = TextAssembler(("ab",))
    assert assembler.push(b"a\xe2") == ""
    assert assembler.finish() == "a�"
    assert assembler.finish() == ""
