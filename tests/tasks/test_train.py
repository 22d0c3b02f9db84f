"""Choosing a rank: by validation loss alone, and the test split only once the choice is made."""

import pytest

from artifacts import ModelBundle, Ref
from tasks import train
from tasks.call import Work
from tasks.prepare import put_json, read_json
from tests.support import FIXTURES


@pytest.mark.parametrize(
    ("losses", "best"), [({4: 0.5, 1: 0.7}, 4), ({8: 0.5, 2: 0.5}, 2), ({1: 0.9, 2: 0.1, 4: 0.3}, 2)]
)
def test_the_lowest_validation_loss_wins_then_the_lower_rank(
    work: Work, monkeypatch: pytest.MonkeyPatch, losses: dict[int, float], best: int
) -> None:
    base = work.store.put_bundle(ModelBundle.load(FIXTURES / "bpe.rift"))
    candidates = tuple(work.store.put_bytes("bundle", f"rank {rank}".encode()) for rank in losses)
    scores = tuple(
        put_json(work.store, "scores", {"rank": rank, "alpha": 2.0 * rank, "validation_loss": loss})
        for rank, loss in losses.items()
    )
    validation, test = (work.store.put_bytes("instructions", name) for name in (b"validation", b"test"))
    tested: list[Ref] = []

    def loss(work: Work, bundle: Ref, split: Ref, context_size: int, batch_size: int, scope: str) -> float:
        if split == test:
            tested.append(bundle)
        return 1.0

    monkeypatch.setattr(train, "instruction_loss", loss)
    results = train.select_rank.body(work, candidates, scores, base, validation, test, 16, 2, "response_only")
    winner = candidates[list(losses).index(best)]
    assert results["bundle"] == winner
    assert read_json(work.store, results["comparison"])["best_rank"] == best
    assert tested == [base, winner]
