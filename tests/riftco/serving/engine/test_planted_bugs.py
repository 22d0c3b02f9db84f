"""Bugs planted in scheduler, pool and sequence, one at a time: the random trials see every one of them."""

from pathlib import Path

import pytest

from riftco.serving.engine.scheduler import Scheduler
from tests.riftco.serving.engine.bugs import ENGINE, POOL, RARE, SCHEDULER, SEQUENCE
from tests.riftco.serving.engine.planting import planted
from tests.riftco.serving.engine.trials import run_trial

BUGS = [*POOL, *SEQUENCE, *SCHEDULER, *ENGINE, *(pytest.param(*bug, marks=pytest.mark.soak) for bug in RARE)]
TRIALS = 2_000  # most bugs show in the first ten


def failure_of(seed: int) -> Exception | None:
    try:
        run_trial(seed)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(("owner", "method", "right", "wrong"), BUGS)
def test_a_planted_bug_is_caught(owner: type, method: str, right: str, wrong: str, tmp_path: Path) -> None:
    with planted(owner, method, right, wrong, tmp_path):
        failure = next(filter(None, map(failure_of, range(TRIALS))), None)
    assert failure is not None, "survived"
    assert not isinstance(failure, (NameError, AttributeError)), f"the bug is no code: {failure!r}"


def test_a_bug_is_gone_afterwards(tmp_path: Path) -> None:
    with planted(Scheduler, "_accept", "size > self.capacity", "size >= self.capacity", tmp_path):
        assert any(map(failure_of, range(40)))
    assert not any(map(failure_of, range(40)))
