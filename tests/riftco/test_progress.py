"""Progress is a bar on a terminal, a line now and then in a log, and gone when the work is."""

import io
import logging
import time

import pytest
from rich.console import Console

from riftco import progress
from riftco.progress import ProgressBar, ProgressLog, show_progress, show_training
from riftco.training import TrainingMetric


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="riftco")
    return caplog


def _terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as standard error, set within the test: pytest's capture sets its own between phases."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=stream, force_terminal=True, width=100))
    return stream


def test_the_log_is_not_chatty(lines: pytest.LogCaptureFixture) -> None:
    show = ProgressLog(interval=0.05)
    deadline = time.monotonic() + 0.12
    while time.monotonic() < deadline:
        show("train", 3, 7, {"mean_loss": 1.23456})
        time.sleep(0.001)
    assert 1 <= len(lines.messages) <= 2
    assert lines.messages[0] == "train: 3 of 7, mean loss 1.235"


def test_a_log_gets_lines_and_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    _terminal(monkeypatch)
    with show_progress() as report:
        assert isinstance(report, ProgressBar)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with show_progress() as report:
        assert isinstance(report, ProgressLog)


def test_the_bar_shows_numbers_and_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with show_progress() as report:
        report("pretrain", 1, 3, {"loss": 1.25})
        report("pretrain", 2, 3, {"loss": 1.125})
        report("pretrain", 3, 3, {"loss": 1.0})
        report("tune", 1, 9, {})
    shown = terminal.getvalue()
    assert "pretrain" in shown
    assert "1/3" in shown or "3/3" in shown
    assert "loss 1." in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_training_shows_its_steps_and_not_its_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []

    class Recorder(ProgressLog):
        def __call__(self, *report: object) -> None:
            seen.append(report)

    monkeypatch.setattr(progress, "ProgressLog", Recorder)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with show_training("pretraining", 2) as sink:
        sink(TrainingMetric("validation", 0, 3.0, 20.0))
        sink(TrainingMetric("train", 1, 2.0, 7.4, 2.5, 1.0, 1.0))
    assert seen == [("pretraining", 1, 2, {"loss": 2.5})]
