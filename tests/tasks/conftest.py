"""What the body of a step gets besides its arguments."""

import logging
from pathlib import Path

import pytest

from artifacts import Store
from tasks.call import Work


@pytest.fixture
def work(tmp_path: Path) -> Work:
    store = Store.open(tmp_path / "store", durability="none")
    log, workspace = logging.getLogger("riftco"), store.workspace("0" * 64)
    return Work(store, "test", log, lambda done, total, **numbers: None, workspace, tmp_path)
