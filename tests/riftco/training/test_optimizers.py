"""The configuration chooses the optimiser."""

import pytest
import torch
from torch import nn

from riftco.config import PretrainingConfig
from riftco.model import Adam
from riftco.training import build_optimizer
from riftco.training.adamw import AdamW
from riftco.training.muon import Muon


@pytest.mark.parametrize(("name", "kind"), [("adam", Adam), ("adamw", AdamW), ("muon", Muon)])
def test_each_name_gives_its_optimizer_at_the_configured_rate(name: str, kind: type) -> None:
    parameters = {"x": nn.Parameter(torch.ones(1))}
    chosen = build_optimizer(parameters, PretrainingConfig(optimizer=name, learning_rate=0.5))
    assert type(chosen) is kind
    assert chosen.learning_rate == 0.5
