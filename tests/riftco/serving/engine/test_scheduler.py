"""The scheduler: thousands of random trials against the definition, and the situations that need care."""

from collections import Counter
from hashlib import blake2b
from itertools import count

import pytest

from riftco.serving.engine.page_pool import PagePool
from riftco.serving.engine.request import GenerationRequest, SamplingParams
from riftco.serving.engine.scheduler import Plan, Scheduler
from riftco.serving.engine.sequence import Sequence, State
from tests.riftco.serving.engine.fake_model import FakeModel, alone
from tests.riftco.serving.engine.invariants import WatchedScheduler
from tests.riftco.serving.engine.trials import SITUATIONS, run_trial

CAPACITY, PAGE = 16, 4


@pytest.mark.parametrize(
    "seeds", [range(2_000), pytest.param(range(2_000, 20_000), marks=pytest.mark.soak)], ids=["quick", "full"]
)
def test_whatever_happens_the_invariants_hold_and_every_answer_is_that_of_the_request_alone(
    seeds: range,
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += run_trial(seed)
        except Exception as error:
            raise AssertionError(f"run_trial({seed}) failed") from error
    assert seen.keys() >= SITUATIONS


class Bench:
    """A watched scheduler with its model; `ask` numbers the requests."""

    def __init__(self, pages: int = 32, running: int = 4, step_tokens: int = 64, **options: bool) -> None:
        self.pool = PagePool(pages)
        self.scheduler = WatchedScheduler(self.pool, PAGE, CAPACITY, running, step_tokens, **options)
        self.model = FakeModel(pages, PAGE)
        self.scheduler.watch(self.model)
        self._ids = count(1)

    def ask(
        self, prompt: int | tuple[int, ...], new: int = 4, choices: int = 1, **options: object
    ) -> list[Sequence]:
        """Queue a request for a prompt of tokens, or of that many tokens."""
        prompt_ids = prompt if isinstance(prompt, tuple) else tuple(1 + i % 15 for i in range(prompt))
        request = GenerationRequest(prompt_ids, new, choices=choices, **options)  # type: ignore[arg-type]
        request_id = next(self._ids)
        made = [Sequence(request, request_id, choice, CAPACITY) for choice in range(choices)]
        self.scheduler.add(made)
        return made

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def step(self) -> Plan:
        plan = self.plan()
        self.scheduler.commit(plan, [drawn.token_id for drawn in self.model.run(plan)])
        return plan

    def finish_all(self) -> int:
        """Step until nothing is left to do; the number of steps."""
        for steps in count():
            if not self.scheduler.busy:
                assert self.pool.free_count == self.pool.page_count
                return steps
            self.step()
        raise AssertionError


def check_answer(sequence: Sequence) -> None:
    expected = alone(sequence.request, sequence.choice, CAPACITY, None)
    assert tuple(sequence.tokens[sequence.prompt_tokens :]) == expected.token_ids
    assert sequence.finish == expected.finish


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8), (16, 15)]
)
def test_a_prompt_asked_again_is_found_to_its_last_full_page_but_one_token_is_computed(
    length: int, cached: int
) -> None:
    bench = Bench()
    (first,) = bench.ask(length)
    bench.finish_all()
    (again,) = bench.ask(length)
    plan = bench.step()
    assert (first.cached_tokens, again.cached_tokens) == (0, cached)
    assert (plan.work[0].begin, plan.work[0].count) == (cached, length - cached)
    assert len(plan.copies) == (length % PAGE == 0)
    bench.finish_all()
    assert again.tokens == first.tokens


def test_where_a_fully_cached_prompt_has_no_room_for_a_copy_it_computes_its_last_page() -> None:
    bench = Bench(pages=CAPACITY // PAGE)
    (first,) = bench.ask(CAPACITY, new=1)
    bench.finish_all()
    assert bench.pool.kept_count == 4
    (again,) = bench.ask(CAPACITY, new=1)
    assert bench.step().copies == ()
    assert again.cached_tokens == CAPACITY - PAGE
    bench.finish_all()
    assert again.tokens == first.tokens


def test_without_a_prefix_cache_nothing_is_shared_and_choices_do_not_wait() -> None:
    bench = Bench(prefix_cache=False)
    bench.ask(8, choices=3)
    assert [work.begin for work in bench.step().work] == [0, 0, 0]
    bench.finish_all()
    bench.ask(8)
    assert bench.step().work[0].begin == 0
    assert bench.pool.kept_count == 0


def test_choices_wait_for_the_first_ones_prompt_and_share_its_pages() -> None:
    bench = Bench(step_tokens=6)
    choices = bench.ask(9, choices=4, sampling=SamplingParams(temperature=1.0))
    works = [[(work.sequence.choice, work.count) for work in bench.step().work] for _ in range(3)]
    assert works == [[(0, 6)], [(0, 3)], [(0, 1), (1, 1), (2, 1), (3, 1)]]
    assert [s.cached_tokens for s in choices] == [0, 8, 8, 8]
    assert sum(bench.pool.counts) == 4 * 3
    assert bench.pool.page_count - bench.pool.free_count == 2 + 4
    bench.finish_all()
    assert len({tuple(s.tokens) for s in choices}) > 1
    for sequence in choices:
        check_answer(sequence)


@pytest.mark.parametrize("what", ["cancelled in the queue", "cancelled midway", "aborted", "ended at once"])
def test_choices_go_on_when_the_first_one_cannot(what: str) -> None:
    bench = Bench(step_tokens=5, running=2)
    leader, *followers = bench.ask(9, choices=3)
    if what == "cancelled in the queue":
        bench.scheduler.finish(leader, "cancelled")
    elif what == "cancelled midway":
        bench.step()
        bench.scheduler.finish(leader, "cancelled")
    elif what == "aborted":
        bench.scheduler.abort(bench.plan())
    else:
        bench.scheduler.end_of_text_id = alone(leader.request, 0, CAPACITY, None).token_ids[0]
    bench.finish_all()
    assert [s.finish for s in followers] == ["stop" if what == "ended at once" else "length"] * 2


def test_choices_go_on_when_the_first_one_is_preempted_before_its_prompt_is_computed() -> None:
    bench = Bench(pages=5, step_tokens=4)
    (older,) = bench.ask((9,) * 7, new=9)
    bench.step()
    leader, *followers = bench.ask(12, choices=2, new=2)
    while leader.state is not State.PREEMPTED:
        bench.step()
        assert leader.generated_tokens == 0
    bench.finish_all()
    for sequence in (older, leader, *followers):
        check_answer(sequence)


def test_who_gives_way_finds_its_pages_again_and_counts_no_token_as_cached_for_that() -> None:
    bench = Bench(pages=5)
    (older,) = bench.ask((1,) * 7, new=9)
    (younger,) = bench.ask((2,) * 9, new=6)
    while not younger.preempted:
        bench.step()
    assert younger.state is State.PREEMPTED
    assert not younger.pages
    while younger.state is State.PREEMPTED:
        plan = bench.step()
    assert plan.work[-1].sequence is younger
    assert plan.work[-1].begin == 4  # its first page; the others were taken by the older one
    bench.finish_all()
    assert younger.cached_tokens == 0
    check_answer(older)
    check_answer(younger)


def test_a_window_that_slid_does_not_find_what_it_held_before() -> None:
    bench = Bench(pages=6)
    (older,) = bench.ask((1,) * 8, new=8, overflow="stop")
    bench.step()
    (younger,) = bench.ask((1,) * 8 + (2,) * 7, new=12, overflow="half")
    while not younger.preempted:
        bench.step()
    assert younger.slid
    bench.finish_all()
    assert younger.cached_tokens == 8
    check_answer(older)
    check_answer(younger)


def test_after_a_page_that_is_gone_nothing_is_found() -> None:
    bench = Bench(pages=7)
    (first,) = bench.ask((1,) * 5, new=1)
    (same_page,) = bench.ask((1,) * 9, new=8)  # computes a page of its own beside the first one's
    bench.step()
    assert first.finish == "length"
    bench.ask((2,) * 16, new=1)  # takes all pages that are left, the first one's too
    bench.step()
    assert same_page.finish is None
    (again,) = bench.ask((1,) * 9, new=1)
    bench.finish_all()
    assert again.cached_tokens == 0
    check_answer(again)


def test_the_random_numbers_go_on_after_a_preemption() -> None:
    bench = Bench(pages=5)
    sampling = SamplingParams(temperature=1.0, seed=7)
    asked = [*bench.ask((1,) * 7, new=9, sampling=sampling), *bench.ask((2,) * 9, new=6, sampling=sampling)]
    bench.finish_all()
    assert bench.scheduler.preemptions > 0
    for sequence in asked:
        check_answer(sequence)


@pytest.mark.parametrize("overflow", ["slide", "half", "stop"])
def test_a_full_context(overflow: str) -> None:
    bench = Bench()
    (sequence,) = bench.ask(15, new=20, overflow=overflow)
    states = []
    while bench.scheduler.busy:
        bench.step()
        states.append(sequence.state)
    check_answer(sequence)
    replays = states.count(State.REPLAY)
    assert (sequence.generated_tokens, replays) == {"slide": (20, 18), "half": (20, 2), "stop": (1, 0)}[
        overflow
    ]


def test_a_window_that_slides_leaves_its_prompts_pages_to_others() -> None:
    bench = Bench()
    bench.ask(15, new=6)
    bench.finish_all()
    (again,) = bench.ask(15)
    bench.step()
    assert again.cached_tokens == 12


def test_of_a_prompt_longer_than_the_context_the_newest_tokens_count() -> None:
    bench = Bench()
    (long,) = bench.ask(tuple(range(1, 15)) * 2)
    bench.finish_all()
    check_answer(long)
    (same_window,) = bench.ask((*(9,) * 5, *long.request.prompt_ids[-CAPACITY:]))
    bench.step()
    assert same_window.cached_tokens == CAPACITY - 1


def test_equal_prompts_of_other_salts_share_nothing() -> None:
    bench = Bench()
    for salt in (b"", b"one", b"two"):
        (sequence,) = bench.ask(8, salt=salt)
        bench.finish_all()
        assert sequence.cached_tokens == 0
    (sequence,) = bench.ask(8, salt=b"one")
    bench.step()
    assert sequence.cached_tokens == 7


@pytest.mark.parametrize("person", [b"", b"salt", b"page"])
def test_a_salt_made_of_what_anothers_key_is_made_of_shares_nothing(person: bytes) -> None:
    bench = Bench()
    bench.ask(tuple(range(1, 9)))
    bench.finish_all()
    first_page = b"".join(token.to_bytes(8, "little") for token in range(1, 5))
    root = blake2b(b"", digest_size=16, person=person).digest()
    (forger,) = bench.ask((5, 6, 7, 8, 9), salt=root + first_page)
    bench.step()
    assert forger.cached_tokens == 0


def test_every_running_sequence_gets_a_token_and_the_oldest_all_that_is_left() -> None:
    bench = Bench(step_tokens=8)
    asked = [bench.ask((token,) * 12)[0] for token in (1, 2, 3, 4, 5)]
    plans = [{w.sequence.request_id: w.count for w in bench.step().work} for _ in range(5)]
    assert plans == [{1: 8}, {1: 4, 2: 4}, {1: 1, 2: 7}, {1: 1, 2: 1, 3: 6}, {1: 1, 2: 1, 3: 6}]
    bench.finish_all()
    for sequence in asked:
        check_answer(sequence)


@pytest.mark.parametrize("sliding", [1, 2, 3, 8])
def test_replays_of_full_contexts_leave_room_for_those_who_come(sliding: int) -> None:
    bench = Bench(pages=4 * (sliding + 1), step_tokens=2 * CAPACITY, running=sliding + 1)
    old = [bench.ask((token,) * CAPACITY, new=40)[0] for token in range(1, 1 + sliding)]
    while not all(sequence.slid for sequence in old):
        bench.step()
    (newcomer,) = bench.ask((9,) * 6, new=3)
    for _ in range(12):
        bench.step()
    assert newcomer.finish == "length"
    assert old[0].finish is None
    bench.finish_all()
    for sequence in (*old, newcomer):
        check_answer(sequence)


def test_a_replay_alone_takes_one_step() -> None:
    bench = Bench(step_tokens=CAPACITY)
    bench.ask(CAPACITY, new=40)
    assert bench.finish_all() == 40


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    bench = Bench(pages=4, running=3)
    bench.ask((1,) * 5, new=3)
    bench.step()
    (large,) = bench.ask((2,) * 16, new=1)
    for token in range(3, 15):
        bench.ask((token,), new=2)
        if large.finish is None:
            bench.step()
    assert large.finish == "length"
    bench.finish_all()


def test_a_failed_step_leaves_only_what_it_preempted_and_evicted() -> None:
    bench = Bench(pages=6)
    bench.ask(8, new=1)
    bench.finish_all()
    running, waiting = bench.ask((9,) * 4, new=8), bench.ask(8)
    bench.step()
    bench.scheduler.abort(bench.plan())
    assert [s.state for s in (*running, *waiting)] == [State.DECODE, State.DECODE]
    bench.finish_all()
    for sequence in (*running, *waiting):
        check_answer(sequence)


def test_the_source_of_a_copy_cannot_be_taken_before_the_step_is_over() -> None:
    bench = Bench(pages=6)
    bench.ask(8, new=1)
    bench.finish_all()
    one, two = bench.ask(8, new=1), bench.ask(8, new=1)
    plan = bench.plan()
    ((source, first), (same, second)) = plan.copies
    assert source == same
    assert len({source, first, second}) == 3
    assert bench.pool.counts[source] == 2
    bench.scheduler.abort(plan)
    assert bench.pool.counts == [0] * 6
    bench.finish_all()
    assert one[0].tokens == two[0].tokens


def test_ending_a_sequence_twice_keeps_the_first_reason() -> None:
    bench = Bench()
    (sequence,) = bench.ask(3)
    bench.scheduler.finish(sequence, "cancelled")
    bench.scheduler.finish(sequence, "timeout")
    assert sequence.finish == "cancelled"
    assert not bench.scheduler.busy
    assert bench.scheduler.plan() is None


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 17, 100])
def test_a_pool_must_hold_one_context(page_size: int) -> None:
    least = -(-CAPACITY // page_size)
    Scheduler(PagePool(least), page_size, CAPACITY, 1, 1)
    with pytest.raises(ValueError, match=f"cannot hold one full context of 16; use at least {least}"):
        Scheduler(PagePool(least - 1), page_size, CAPACITY, 1, 1)


@pytest.mark.parametrize(("running", "step_tokens"), [(0, 5), (-1, 5), (5, 4)])
def test_a_step_must_advance_every_running_sequence(running: int, step_tokens: int) -> None:
    with pytest.raises(ValueError, match="raise step_tokens or lower maximum_running"):
        Scheduler(PagePool(4), PAGE, CAPACITY, running, step_tokens)
