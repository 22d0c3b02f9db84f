"""Progress is a bar on a terminal, a line now and then in a log, and gone when the work is."""

import io
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from riftco import progress
from riftco.progress import ProgressBar, ProgressLog, show_progress

_MOST = {
    "loss": 9999.0,
    "validation_loss": 9999.0,
    "learning_rate": 10.0,
    "gradient_norm": 9999.0,
    "tokens_per_second": 9e6,
    "matrix_fraction": 1.0,
    "peak_memory_bytes": 100.0 * 2**30,
}


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
    assert lines.messages[0] == "train      3/7  mean loss 1.235"


def test_a_line_of_training_says_what_people_expect(lines: pytest.LogCaptureFixture) -> None:
    numbers = {
        "loss": 1.23456,
        "learning_rate": 3e-3,
        "gradient_norm": 0.7123,
        "tokens_per_second": 12345.4,
        "matrix_fraction": 0.312,
        "peak_memory_bytes": 412 * 2**20,
    }
    show = ProgressLog(interval=0)
    show("pretrain", 120, 750, numbers)
    show("import, MiB", 7, 8, {})
    assert lines.messages == [
        "pretrain   120/750  loss 1.2346  lr 3.0e-03  norm 0.71     12,345 tok/s  matrix  31 %      412 MiB",
        "import, MiB 7/8",
    ]


@given(st.integers(1, 750), st.tuples(*(st.floats(most * 1e-12, most) for most in _MOST.values())))
def test_numbers_stand_under_those_of_the_line_before(step: int, values: tuple[float, ...]) -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress.LOGGER, "info", lambda text, line: said.append(line))
        show = ProgressLog(interval=0)
        show("pretrain", step, 750, dict(zip(_MOST, values, strict=True)))
        show("pretrain", 750, 750, dict.fromkeys(_MOST, 0.5))
    first, second = said
    assert len(first) == len(second)
    for mark in ("/750", "loss", "val", "lr", "norm", " tok/s", "matrix", " %", " MiB"):
        assert first.index(mark) == second.index(mark)


@given(st.floats(0, 99_999), st.sampled_from([4, 6]))
def test_a_number_keeps_as_many_digits_as_there_is_room_for(value: float, width: int) -> None:
    text = progress._fixed(value, width)
    whole = len(f"{value:.0f}")
    assert len(text) == max(width, whole)
    assert float(text) == pytest.approx(value, abs=0.5 * 10.0 ** -max(0, width - 1 - whole) + 1e-12)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_none_is_shown_as_such(value: float) -> None:
    assert progress._fixed(value, 6) == f"   {value}"


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
        report("pretrain", 3, 3, {"loss": 1.0, "gradient_norm": 0.5, "tokens_per_second": 1234.0})
        report("tune", 1, 9, {})
    shown = terminal.getvalue()
    assert "pretrain" in shown
    assert "1/3" in shown or "3/3" in shown
    assert "loss 1." in shown
    assert "1,234 tok/s" in shown
    assert "norm" not in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
