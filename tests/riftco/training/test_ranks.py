"""Runs that several processes share: data, losses and weights of one, and the same end for all of them."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts import ModelBundle, Workspace
from riftco.config import LoraConfig, PostTrainingConfig
from riftco.errors import InputError, NonFiniteError, TrainingStopped
from riftco.model import Adam
from riftco.training import TrainingBatch, TrainingMetric
from riftco.training.metrics import decode_metrics
from riftco.training.ranks import Ranks, is_leader, is_rank, joined, trains_here
from tests.artifacts.children import Say
from tests.riftco.training.forked_ranks import LORA, STEPS, TUNING, in_ranks, one_thread, pretrained, tuned

Train = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread_in_parents() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def fsdp_is_imported() -> None:
    """Once for all forked processes: it takes seconds."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def trained_by(
    size: int, train: Train, folder: Path, **settings: Any
) -> tuple[ModelBundle, list[TrainingMetric]]:
    """The bundle and the metrics of ranks, which all have the same, and report once."""

    def job(say: Say) -> None:
        seen: list[TrainingMetric] = []
        result = train(processes=size, sink=seen.append, **settings)
        losses = [[metric.phase, metric.step, metric.loss, metric.token_count] for metric in result.metrics]
        say({"id": result.bundle.artifact_id, "losses": losses, "seen": len(seen)})
        if is_leader():
            result.bundle.save(folder / "ranks.rift")

    said = in_ranks(job, size)
    first = said[0][0]
    assert all(answers[0] == {**first, "seen": 0} for answers in said[1:])
    assert first["seen"] == len(first["losses"])
    metrics = [
        TrainingMetric(phase, step, loss, 0.0, token_count=count)
        for phase, step, loss, count in first["losses"]
    ]
    return ModelBundle.load(folder / "ranks.rift"), metrics


def assert_same_run(bundle: ModelBundle, metrics: list[TrainingMetric], alone: Any) -> None:
    """Data and counts exactly, losses within 1e-6, weights to rounding.

    But keys' biases: their gradient is zero but for rounding, which Adam blows up to the learning rate.
    """
    expected = [(m.phase, m.step, m.token_count) for m in alone.metrics]
    assert [(m.phase, m.step, m.token_count) for m in metrics] == expected
    assert [m.loss for m in metrics] == pytest.approx([m.loss for m in alone.metrics], rel=0, abs=1e-6)
    for name, values in alone.bundle.tensors().items():
        if not name.endswith("key.bias"):
            np.testing.assert_allclose(bundle.tensors()[name], values, rtol=0, atol=2e-5, err_msg=name)


SHARED: dict[str, Train] = {
    "pretraining, Muon, ragged and accumulated": partial(pretrained, optimizer="muon"),
    "full, Adam": partial(tuned, held_out=3),
    "LoRA, AdamW": partial(tuned, **LORA, optimizer="adamw"),
    "QLoRA, paged Adam": partial(tuned, fine_tuning_method="qlora", lora=LoraConfig(rank=2)),
    "packed responses": partial(
        tuned, sampling_strategy="packed", loss_scope="response_only", accumulation_steps=2
    ),
}
SHARDED: dict[str, Train] = {
    "pretraining, Adam, ragged and accumulated": pretrained,
    "LoRA, AdamW, checkpointed blocks": partial(
        tuned, held_out=3, **LORA, optimizer="adamw", activation_checkpointing="block"
    ),
}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SHARED)
def test_ranks_train_as_one_process_does(tmp_path: Path, name: str, size: int) -> None:
    assert_same_run(*trained_by(size, SHARED[name], tmp_path), SHARED[name]())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_train_as_one_process_does(
    tmp_path: Path, fsdp_is_imported: None, name: str, size: int
) -> None:
    bundle, metrics = trained_by(size, SHARDED[name], tmp_path, sharding="full")
    assert_same_run(bundle, metrics, SHARDED[name]())


def part_way(run: Train, size: int, workspace: Workspace, **settings: Any) -> None:
    """Leave the checkpoint of half a run, by so many ranks."""
    keep = {"steps": STEPS // 2, "checkpoint_steps": STEPS // 2, **settings}
    if size == 1:
        run(workspace, **keep)
    else:
        in_ranks(lambda say: run(workspace, processes=size, **keep), size)


@pytest.mark.parametrize(
    ("before", "after", "sharding"),
    [(1, 2, "none"), (2, 1, "none"), (1, 2, "full"), (2, 1, "full")],
    ids=["1 to 2", "2 to 1", "1 to 2 shards", "2 shards to 1"],
)
def test_a_checkpoint_is_gone_on_from_by_another_number_of_ranks(
    tmp_path: Path, fsdp_is_imported: None, before: int, after: int, sharding: str
) -> None:
    train = tuned if sharding == "none" else partial(tuned, **LORA)
    workspace = Workspace(tmp_path / "work", sync=False)
    sharded = {"sharding": sharding}
    part_way(train, before, workspace, **(sharded if before > 1 else {}))
    seen: list[TrainingMetric] = []
    alone = train()
    if after == 1:
        result = train(workspace, seen.append)
        assert seen[0].step == STEPS // 2 + 1
        assert_same_run(result.bundle, list(result.metrics), alone)
    else:
        resumed = partial(train, workspace)

        def job(say: Say) -> None:
            result = resumed(processes=after, sink=seen.append, **sharded)
            say({"first": seen[0].step if seen else None})
            if is_leader():
                result.bundle.save(tmp_path / "ranks.rift")
                say([metric.loss for metric in result.metrics])

        (first, losses), _ = in_ranks(job, after)
        assert first == {"first": STEPS // 2 + 1}
        assert losses == pytest.approx([m.loss for m in alone.metrics], rel=0, abs=1e-6)


@pytest.mark.parametrize(("sharding", "signalled"), [("none", 0), ("none", 1), ("full", 1)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_with_the_state_kept(
    tmp_path: Path, fsdp_is_imported: None, signalled: int, sharding: str
) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)

    def job(say: Say) -> None:
        signal.signal(signal.SIGTERM, lambda *_: say("delivered"))
        step, at_once = 0, Ranks.sum

        def counting(self: Ranks, values: torch.Tensor) -> None:
            nonlocal step
            step += 1
            if step == 5 and self.rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            at_once(self, values)

        Ranks.sum = counting  # type: ignore[method-assign]
        try:
            tuned(workspace, processes=2, sharding=sharding)
        except TrainingStopped as error:
            say(str(error))

    said = in_ranks(job)
    assert ["delivered" in answers for answers in said] == [signalled == 0, signalled == 1]
    ends = {answer for answers in said for answer in answers} - {"delivered"}
    (point,) = workspace.points(lambda *_: None)
    assert 0 < point.checkpoint.global_step < STEPS
    assert ends == {f"stopped at step {point.checkpoint.global_step}; the same command goes on from there"}
    assert decode_metrics(point.metrics)[-1].step == point.checkpoint.global_step


@pytest.mark.parametrize(("sharding", "policy"), [("none", "raise"), ("none", "skip"), ("full", "raise")])
def test_what_is_not_finite_on_one_rank_is_decided_alike_by_all(
    tmp_path: Path, fsdp_is_imported: None, policy: str, sharding: str
) -> None:
    def job(say: Say) -> None:
        poison_rows(rank=1, call=3)
        workspace = Workspace(tmp_path / "work", sync=False)
        try:
            result = tuned(workspace, processes=2, nonfinite=policy, sharding=sharding)
            say([[metric.step for metric in result.metrics], result.bundle.artifact_id])
        except NonFiniteError as error:
            say([error.facts["step"], error.facts["loss"]])

    (first,), (second,) = in_ranks(job)
    assert first == second
    if policy == "raise":
        assert first == [3, None]
        assert (tmp_path / "work" / "step-3.nonfinite.json").exists()
    else:
        assert first[0] == [1, 2, 4, 5, 6]


def poison_rows(rank: int, call: int) -> None:
    """Make the loss of one rank's rows NaN, once."""
    from riftco.training import loop

    calls, clean = 0, loop.next_token_loss

    def poisoned(*arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = clean(*arguments, **named)
        return loss * float("nan") if (calls, int(os.environ["RANK"])) == (call, rank) else loss

    loop.next_token_loss = poisoned


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any),
    ranks=st.integers(1, 4),
    starts=st.booleans(),
)
def test_every_row_belongs_to_one_rank(sizes: list[int], ranks: int, starts: bool) -> None:
    shape = (len(sizes), 5)
    ids = torch.arange(len(sizes) * 5).view(shape)
    mask = torch.arange(5) < torch.tensor(sizes)[:, None]
    begins = torch.zeros(shape, dtype=torch.int64) if starts else None
    batch = TrainingBatch(ids, ids + 1, mask, begins)
    found: list[int] = []
    for rank in range(ranks):
        subject = object.__new__(Ranks)
        subject.rank, subject.size = rank, ranks
        rows = subject.rows(batch)
        mine = list(range(rank, len(sizes), ranks))
        if rows is None:
            assert not any(sizes[index] for index in mine)
            continue
        assert rows.inputs.equal(ids[mine])
        assert rows.targets.equal(ids[mine] + 1)
        assert (rows.document_starts is None) != starts
        assert rows.mask is not None
        found.append(rows.counted)
    assert sum(found) == batch.counted


def test_messages_between_ranks_arrive_whole_and_alike() -> None:
    sent = random.Random(3).randbytes(100_001)

    def job(say: Say) -> None:
        with joined(torch.device("cpu")) as ranks:
            mine = ranks.rank == 1
            say(ranks.any(mine, not mine, False, True))
            received = [ranks.from_leader(x if ranks.leader else None) for x in (sent, b"", b"x")]
            say([received == [sent, b"", b"x"], ranks.size])
        say(torch.distributed.is_initialized())

    for said in in_ranks(job, 3):
        assert said == [[True, True, False, True], [True, 3], False]


def test_a_step_over_shards_is_that_over_whole_parameters(fsdp_is_imported: None) -> None:
    values, gradient = torch.linspace(-2, 3, 96).view(12, 8), torch.linspace(4, -3, 96).view(12, 8)

    def job(say: Say) -> None:
        from riftco.training.sharded_optimizers import ShardAdam

        with joined(torch.device("cpu")) as ranks:
            for scale in (1e-3, 10.0):  # not clipped, clipped
                whole = torch.nn.Parameter(values.clone())
                mine = torch.nn.Parameter(values.chunk(2)[ranks.rank].clone())
                alone, shared = Adam({"w": whole}), ShardAdam({"w": mine})
                shared.ranks = ranks
                for step in range(3):
                    whole.grad = scale * (gradient - step)
                    mine.grad = whole.grad.chunk(2)[ranks.rank].clone()
                    stats = alone.step(), shared.step()
                say(mine.equal(whole.chunk(2)[ranks.rank]))
                say([stats[0].gradient_norm, stats[1].gradient_norm])

    for same, norms, same_clipped, clipped_norms in in_ranks(job):
        assert same is same_clipped is True
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        assert clipped_norms[0] == pytest.approx(clipped_norms[1], rel=1e-12)


@pytest.mark.parametrize(
    ("spoilt", "value", "rate"),
    [(0, 3.4e38, 1e38), (1, float("inf"), 1e-3)],
    ids=["where all doubt", "where one doubts"],
)
def test_a_step_that_would_overflow_on_one_rank_is_taken_by_none(
    fsdp_is_imported: None, spoilt: int, value: float, rate: float
) -> None:
    def job(say: Say) -> None:
        from riftco.training.sharded_optimizers import ShardAdam

        with joined(torch.device("cpu")) as ranks:
            parameter = torch.nn.Parameter(torch.full((4,), value if ranks.rank == spoilt else 1.0))
            optimizer = ShardAdam({"w": parameter}, rate)
            optimizer.ranks = ranks
            before = [parameter.detach().clone(), optimizer.first_moments, optimizer.second_moments]
            parameter.grad = torch.full((4,), -1.0)
            try:
                optimizer.step()
            except ValueError as error:
                say(str(error))
            after = [parameter.detach(), optimizer.first_moments, optimizer.second_moments]
            say([x.equal(y) for x, y in zip(before, after, strict=True)])
            say([optimizer.step_count, parameter.grad is not None])

    for message, same, (steps, waiting) in in_ranks(job):
        assert "not finite; nothing was updated" in message
        assert same == [True] * 3
        assert (steps, waiting) == (0, True)


def launched(monkeypatch: pytest.MonkeyPatch, **variables: Any) -> None:
    """The environment of a rank."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", **variables}.items():
        monkeypatch.setenv(name, str(value))


def of(processes: int) -> PostTrainingConfig:
    return TUNING.model_copy(update={"processes": processes})


def test_a_launcher_of_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_rank()
    launched(monkeypatch, RANK=1, WORLD_SIZE=4)
    with pytest.raises(InputError, match="processes is 1 and the launcher started 4"):
        tuned()
    assert trains_here(of(4), "cpu")
    assert not is_leader()
    with pytest.raises(InputError, match="needs backend cpu or cuda, not metal"):
        trains_here(of(4), "metal")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_a_process_is_a_rank_only_if_a_launcher_said_all_of_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    launched(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert (is_rank(), is_leader()) == (True, False)
    monkeypatch.delenv(missing)
    assert (is_rank(), is_leader()) == (False, True)
    assert trains_here(of(1), "cpu")
    assert not trains_here(of(2), "cpu")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK is 2 but ranks of WORLD_SIZE 2 count from 0 to 1"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK is 'one', not a number; start ranks with torchrun"),
        ({"RANK": 0, "WORLD_SIZE": ""}, "WORLD_SIZE is '', not a number"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK is '-1', not a number"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], says: str
) -> None:
    launched(monkeypatch, **variables)
    with pytest.raises(InputError, match=says):
        trains_here(of(2), "cpu")


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert not trains_here(of(2), "cuda")
    with pytest.raises(InputError, match="needs a GPU and this machine has 2; set processes to at most"):
        trains_here(of(3), "cuda")
    launched(monkeypatch, RANK=5, WORLD_SIZE=6, LOCAL_RANK=1)
    assert trains_here(of(6), "cuda")
    assert taken == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="this machine has 2; set the launcher's processes"):
        trains_here(of(6), "cuda")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(InputError, match="LOCAL_RANK is ''"):
        trains_here(of(6), "cuda")
    assert taken == [1]


class Sinking(Exception):
    """What a sink of the leader raises."""


@pytest.mark.parametrize(("raising", "kept"), [(0, []), (2, [2]), (3, [2, 3])])
def test_a_sink_that_raises_on_the_leader_leaves_each_state_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raising: int, kept: list[int]
) -> None:
    saved: list[int] = []
    save = Workspace.save

    def counting(self: Workspace, checkpoint: Any, metrics: bytes) -> None:
        saved.append(checkpoint.global_step)
        save(self, checkpoint, metrics)

    monkeypatch.setattr(Workspace, "save", counting)

    def sink(metric: TrainingMetric) -> None:
        if metric.step == raising:
            raise Sinking

    def job(say: Say) -> None:
        workspace = Workspace(tmp_path / "work", sync=False)
        try:
            pretrained(workspace, sink, processes=2, checkpoint_steps=2)
        except Sinking:
            say(saved)
            os._exit(0)  # before what the other rank misses is waited for
        except RuntimeError:
            say("missed the leader")

    leader, other = in_ranks(job)
    assert leader == [kept]
    assert other == ["missed the leader"]
