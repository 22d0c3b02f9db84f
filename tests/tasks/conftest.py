"""What the body of a step gets besides its arguments."""

import logging
from pathlib import Path

import pytest

from artifacts import Store
from tasks.call import Work


@pytest.fixture
def work(tmp_path: Path) -> Work:
    store = Store.open(tmp_path / "store", durability="none")
    return Work(store, "test", logging.getLogger("riftco"), progress=lambda done, total, **numbers: None)
