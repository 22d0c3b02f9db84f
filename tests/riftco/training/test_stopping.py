"""A signal waits for the end of the block, is delivered then, and a second one does not wait."""

import os
import signal
import threading

import pytest

from riftco.training.stopping import deferred_signals


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch):
    """The signals that reach the handlers that were there before."""
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, frame: seen.append(number))
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_delivered_when_the_block_is_left(delivered: list[int], number: int) -> None:
    with deferred_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert delivered == []
    assert delivered == [number]


def test_a_second_signal_does_what_it_did_before(delivered: list[int]) -> None:
    with deferred_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert delivered == [signal.SIGINT]
    assert delivered == [signal.SIGINT, signal.SIGTERM]


def test_without_a_signal_the_handlers_are_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), deferred_signals():
        raise KeyError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_deferred() -> None:
    requests: list[bool] = []

    def run() -> None:
        with deferred_signals() as stop:
            requests.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert requests == [False]
