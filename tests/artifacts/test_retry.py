"""Trying again: how often, how long in between, and where a stream goes on."""

import pytest

from artifacts import StoreError
from artifacts.retry import Patience, TemporaryError


def trouble() -> TemporaryError:
    return TemporaryError("remote-unreachable", "gone")


def test_an_action_that_works_is_done_once():
    calls: list[int] = []
    assert Patience(sleep=calls.append).retry(lambda: 7) == 7
    assert calls == []


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_temporary_failures_are_tried_again_after_growing_pauses(failures):
    pauses: list[float] = []
    left = [trouble()] * failures

    def action() -> str:
        if left:
            raise left.pop()
        return "done"

    patience = Patience(tries=4, first_pause=1.0, longest_pause=3.0, sleep=pauses.append)
    assert patience.retry(action) == "done"
    assert len(pauses) == failures
    for pause, longest in zip(pauses, (1.0, 2.0, 3.0), strict=False):
        assert longest / 2 <= pause <= longest


def test_the_last_failure_is_raised():
    pauses: list[float] = []
    tried: list[TemporaryError] = []

    def action() -> None:
        tried.append(trouble())
        raise tried[-1]

    with pytest.raises(TemporaryError) as caught:
        Patience(tries=3, sleep=pauses.append).retry(action)
    assert caught.value is tried[-1]
    assert (len(tried), len(pauses)) == (3, 2)


def test_what_will_not_change_is_not_tried_again():
    tried = []

    def action() -> None:
        tried.append(1)
        raise StoreError("remote-denied", "no")

    with pytest.raises(StoreError, match="no"):
        Patience(sleep=lambda pause: None).retry(action)
    assert tried == [1]


def test_a_stream_goes_on_where_it_broke_off():
    data, opened = bytes(range(100)), []

    def stream_from(start):
        opened.append(start)
        yield data[start : start + 20]
        if start < 80:
            raise trouble()

    patience = Patience(
        tries=2, sleep=lambda pause: None
    )  # each stream brings something, so none is the last
    assert b"".join(patience.resume(stream_from, 100)) == data
    assert opened == [0, 20, 40, 60, 80]


def test_a_stream_that_brings_nothing_is_given_up():
    opened = []

    def stream_from(start):
        opened.append(start)
        if start == 0:
            yield b"abc"
        raise trouble()

    stream = Patience(tries=3, sleep=lambda pause: None).resume(stream_from, 10)
    assert next(stream) == b"abc"
    with pytest.raises(TemporaryError):
        next(stream)
    assert opened == [0, 3, 3]


def test_a_failure_after_the_last_byte_is_none():
    def stream_from(start):
        assert start == 0
        yield b"abc"
        raise trouble()

    assert b"".join(Patience(sleep=lambda pause: None).resume(stream_from, 3)) == b"abc"


def test_a_stream_that_ends_early_without_failing_is_the_callers_matter():
    assert list(Patience().resume(lambda start: iter([b"abc"]), 10)) == [b"abc"]
