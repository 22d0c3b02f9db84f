"""What pretraining says of its model, and choosing a rank: the test split only once the choice is made."""

import math

import pytest

from artifacts import ModelBundle, Ref
from riftco.config import PretrainingConfig
from tasks import train
from tasks.call import Work
from tasks.prepare import fit_tokenizer, put_json, read_json, read_records
from tests.support import FIXTURES


@pytest.mark.parametrize("strategy", ["random_window", "document_rows"])
def test_the_last_validation_loss_and_the_score_are_of_one_text(work: Work, strategy: str) -> None:
    """Drawn in bits per byte, the last point is the score, but for windows being a sample."""
    config = PretrainingConfig(
        steps=40,
        context_size=16,
        learning_rate=3e-2,
        optimizer="adamw",
        vocabulary_size=300,
        validation_batch_count=50,
        sampling_strategy=strategy,  # type: ignore[arg-type]
    )
    training = work.store.put_bytes("text", b"".join(b"a mill %d\n\n" % i for i in range(60)))
    validation = work.store.put_bytes("text", b"".join(b"a mill %d\n\n" % i for i in range(60, 90)))
    size = config.vocabulary_size
    tokenizer = fit_tokenizer.body(work, training, None, "bpe", size, 2, end_of_text=False)["tokenizer"]
    results = train.pretrain.body(work, training, validation, tokenizer, config)
    scores = read_json(work.store, results["scores"])
    last = read_records(work.store, results["metrics"])[-1]["loss"]
    shown = last / math.log(2) / scores["bytes_per_token"]["validation"]
    assert shown == pytest.approx(scores["bits_per_byte"], rel=0.05)


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
