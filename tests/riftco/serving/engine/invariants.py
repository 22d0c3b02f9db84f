"""What must hold after every call of a scheduler.

E1 A page's count is the number of page tables that name it. E2 Free pages and pages in use partition the
pool. E3 Keys and pages agree both ways. E4 A published page is full, was computed by a committed step and
is never written again. E5 A page is written only by its one user, unpublished; else it is copied first. E6
No more is computed than the window holds, and slot j holds token j at position j. E7 A sampling step
computes at least a token. E8 A plan keeps to tokens, sequences and pages, and admits nobody if it preempted
somebody. E9 Something is done in every step; the older are not preempted or passed over for the younger.
E10 Of what has ended nothing remains. E12 A page is seen under one salt only.

E11 (an answer is that of the request alone) and E13 (one last event, exact texts and counts) are of whole
requests: see `trials`. What a step reads, for E6 and E12, `FakeModel` checks.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from riftco.serving.engine.request import FinishReason
from riftco.serving.engine.scheduler import Plan, Scheduler, Work
from riftco.serving.engine.sequence import Sequence, State
from tests.riftco.serving.engine.fake_model import FakeModel, Slot


class WatchedScheduler(Scheduler):
    """A scheduler that fails with AssertionError as soon as an invariant does not hold."""

    model: FakeModel

    def watch(self, model: FakeModel) -> None:
        self.model = model
        self.preempted_in_plan: list[Sequence] = []
        self.first_begins: dict[tuple[int, int], int] = {}  # of each choice's first committed work
        self._before: dict[Sequence, tuple[Any, ...]] = {}
        self._contents: dict[int, list[Slot | None]] = {}  # of published pages
        self._meanings: dict[bytes, tuple[bytes, int, int]] = {}  # what each key has stood for

    def add(self, sequences: Iterable[Sequence]) -> None:
        super().add(sequences)
        self._check_all()

    def plan(self) -> Plan | None:
        running, waiting, keys = list(self.running), list(self.waiting), dict(self.pool._keys)
        eligible = [s for s in waiting if s.leader is None or s.leader.finish or s.leader.generated_tokens]
        busy, preemptions = self.busy, self.preemptions
        self._before = {s: _state(s) for s in running + waiting}
        plan = super().plan()
        assert (plan is not None) == busy, "E9: with something to do, something is done"
        if plan is None:
            return None
        self._check_all(plan)
        assert self.pool._keys.items() <= keys.items(), "E4: published before it was computed"
        preempted = self.preempted_in_plan = [s for s in running if not s.running]
        assert self.preemptions == preemptions + len(preempted)
        admitted = [work.sequence for work in plan.work if work.admitted]
        self._check_limits(plan)
        self._check_writes(plan)
        self._check_order(plan, running, eligible, preempted, admitted)
        return plan

    def commit(self, plan: Plan, token_ids: Iterable[int]) -> None:
        for work in plan.work:
            self.first_begins.setdefault(work.sequence.arrival, work.begin)
        starts = [work.sequence.start for work in plan.work]
        super().commit(plan, token_ids)
        self._check_all()
        for work, start in zip(plan.work, starts, strict=True):
            if work.sequence.running and work.sequence.start == start:
                self._check_computed(work)

    def abort(self, plan: Plan) -> None:
        self.model.spoil(plan)
        super().abort(plan)
        for work in plan.work:
            assert _state(work.sequence) == self._before[work.sequence], "an aborted step left a trace"
        self._check_all()

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        super().finish(sequence, reason)
        assert sequence.state is State.FINISHED
        assert not sequence.pages, "E10"
        assert sequence not in self.running + self.waiting, "E10"

    def _check_computed(self, work: Work) -> None:
        sequence, end = work.sequence, work.begin + work.count
        assert sequence.computed == end, "E6"
        if self.prefix_cache and not sequence.slid:
            first, last = work.begin // self.page_size, end // self.page_size
            keys = sequence.page_keys(self.page_size, last)[first:]
            assert self.pool._pages.keys() >= set(keys), "E4: a full page was not published"

    def _check_all(self, plan: Plan | None = None) -> None:
        self._check_tables(plan.copies if plan else ())
        self._check_published()
        self.model.forget(self.pool._blank)

    def _check_tables(self, copies: Iterable[tuple[int, int]]) -> None:
        pool = self.pool
        named = [0] * pool.page_count
        for source, _ in copies:
            named[source] += 1
        for sequence in self.running:
            assert sequence.running
            assert sequence.finish is None
            assert 0 <= sequence.computed < len(sequence.tokens) - sequence.start <= self.capacity, "E6"
            for page in sequence.pages:
                named[page] += 1
        for sequence in self.waiting:
            assert not sequence.running
            assert sequence.finish is None
            assert not sequence.pages, "E10"
            assert sequence.computed == 0
        assert named == pool.counts, "E1: counts are not those of the page tables"
        used = [page for page, count in enumerate(named) if count]
        assert sorted([*used, *pool._blank, *pool._kept]) == list(range(pool.page_count)), "E2"
        assert pool.free_count == pool.page_count - len(used), "E2"
        assert dict(zip(pool._pages.values(), pool._pages, strict=True)) == pool._keys, "E3"
        assert len(pool._pages) == len(pool._keys), "E3"
        assert pool._kept.keys() <= pool._keys.keys(), "E3"
        assert pool._keys.keys().isdisjoint(pool._blank), "E3"
        for sequences in (self.running, self.waiting):
            arrivals = [s.arrival for s in sequences]
            assert arrivals == sorted(set(arrivals)), "E9: oldest first"

    def _check_published(self) -> None:
        """E4, and that a key stands for one salt, one place and one history of tokens (E12)."""
        pages, contents = self.model.pages, self._contents
        for page in contents.keys() - self.pool._keys.keys():
            del contents[page]
        for page, key in self.pool._keys.items():
            if page in contents:
                assert pages[page] == contents[page], "E4: a published page was written"
                continue
            contents[page] = list(pages[page])
            assert None not in pages[page], "E4: published before it is full"
            _, position, salt, hashed = pages[page][-1] or (0, 0, b"", 0)
            assert position % self.page_size == self.page_size - 1
            meaning = (salt, position, hashed)
            assert self._meanings.setdefault(key, meaning) == meaning, "E12: a key of two meanings"

    def _check_limits(self, plan: Plan) -> None:
        counts = [work.count for work in plan.work]
        assert min(counts) >= 1, "E7"
        assert sum(counts) <= self.step_tokens, "E8"
        assert len(self.running) <= self.maximum_running, "E8"
        assert sorted(w.sequence.arrival for w in plan.work) == [s.arrival for s in self.running], "E9"
        for work in plan.work:
            sequence = work.sequence
            left = len(sequence.tokens) - sequence.start - work.begin - work.count
            assert work.begin == sequence.computed, "E6"
            assert left >= 0, "E6"
            assert work.samples == (left == 0), "E7"
        held_back = [work.sequence.slid for work in plan.work if not work.samples]
        if held_back and not self.preempted_in_plan and not all(held_back):
            assert sum(counts) == self.step_tokens, "E9: tokens wait while the budget has room"

    def _check_writes(self, plan: Plan) -> None:
        """E5, and that a sequence holds no page before it needs it."""
        targets = {target for _, target in plan.copies}
        written: list[int] = []
        for work in plan.work:
            pages, end = work.sequence.pages, work.begin + work.count
            assert len(pages) == -(-end // self.page_size)
            assert len(work.new_pages) == 0 or tuple(pages[-len(work.new_pages) :]) == work.new_pages
            assert targets.isdisjoint(pages[: work.begin // self.page_size])
            written += pages[work.begin // self.page_size :]
        assert len(written) == len(set(written)), "E5: two write one page"
        for page in written:
            assert self.pool.counts[page] == 1, "E5: a shared page is written"
            assert page not in self.pool._keys, "E5: a published page is written"
        assert targets <= set(written)
        for source, _ in plan.copies:
            assert source in self.pool._keys, "only published pages are copied"

    def _check_order(
        self,
        plan: Plan,
        running: list[Sequence],
        eligible: list[Sequence],
        preempted: list[Sequence],
        admitted: list[Sequence],
    ) -> None:
        assert not (preempted and admitted), "E8: admitted in a step that preempted"
        assert preempted == running[len(running) - len(preempted) :], "E9: an older one was preempted"
        assert not running or running[0].running, "E9: the oldest was preempted"
        assert set(admitted) <= set(eligible), "a follower ran before its leader"
        assert admitted == eligible[: len(admitted)], "E9: admitted out of turn"
        passed_over = eligible[len(admitted) :]
        budget = self.step_tokens - sum(work.count for work in plan.work)
        if passed_over and not preempted and len(self.running) < self.maximum_running:
            prompts = [w for w in plan.work if w.count > 1 and not w.sequence.slid]
            assert budget or prompts or admitted, "E9: replays took everything"
            window = len(passed_over[0].tokens) - passed_over[0].start
            assert not budget or -(-window // self.page_size) > self.pool.free_count, "E9: it had room"


_counts = attrgetter(
    *("start", "computed", "published", "cached_tokens", "slid", "preempted", "uniform", "running", "finish")
)


def _state(sequence: Sequence) -> tuple[Any, ...]:
    """What an aborted step must leave alone; not its leader, who no longer matters once it may start."""
    return list(sequence.tokens), list(sequence.pages), _counts(sequence)
