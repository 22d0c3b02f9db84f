"""Which tokens are computed in the next step, and where their keys and values go.

There are no phases: a sequence has tokens and a count of those computed, and each step lets the count catch
up by as many tokens as the budget allows. A prompt in chunks, a prefix found in the cache, the return after a
preemption and the replay of a full context are the same path. A step is `plan`, a forward, then `commit` or,
if the forward failed, `abort`, after which every sequence and page of the plan is as before it; what was
preempted or evicted to make room stays so.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from riftco.serving.engine.page_pool import PagePool
from riftco.serving.engine.request import FinishReason
from riftco.serving.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence from position `begin` of its window on; the last one may give a sample."""

    sequence: Sequence
    begin: int
    count: int
    samples: bool
    new_pages: tuple[int, ...]
    admitted: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's work, running sequences first, and the pages to copy, (from, to), before it."""

    work: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...]

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from this step, in the order of their rows."""
        return tuple(work.sequence for work in self.work if work.samples)


@dataclass(slots=True)
class Scheduler:
    """Sequences waiting and running, oldest first, over one pool of pages of `page_size` tokens.

    `capacity` is the model's context; at most `maximum_running` sequences and `step_tokens` tokens go into a
    step, each running sequence at least one. ValueError for limits with which the oldest could not go on.
    """

    pool: PagePool
    page_size: int
    capacity: int
    maximum_running: int
    step_tokens: int
    prefix_cache: bool = True
    end_of_text_id: int | None = None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0

    def __post_init__(self) -> None:
        if self.pool.page_count < self._pages_for(self.capacity):
            raise ValueError(
                f"{self.pool.page_count} pages of {self.page_size} tokens cannot hold one full context of "
                f"{self.capacity}; use at least {self._pages_for(self.capacity)}"
            )
        if not 1 <= self.maximum_running <= self.step_tokens:
            raise ValueError(
                f"a step of {self.step_tokens} tokens cannot advance {self.maximum_running} sequences; "
                "raise step_tokens or lower maximum_running"
            )

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the choices of a request. All but the first wait for its prompt, to share those pages."""
        first, *others = sequences
        if self.prefix_cache:
            for sequence in others:
                sequence.leader = first
        self.waiting += [first, *others]

    def plan(self) -> Plan | None:
        """The next step; None when nothing can be computed."""
        preemptions = self.preemptions
        work, budget = self._advance(self.step_tokens)
        copies: list[tuple[int, int]] = []
        if self.preemptions == preemptions:
            work += self._admit_waiting(budget, copies)
        return Plan(tuple(work), tuple(copies)) if work else None

    def _advance(self, budget: int) -> tuple[list[Work], int]:
        """The running sequences' work, the oldest first and one token kept for each, and the budget left."""
        work: list[Work] = []
        replay = self._replay_share(budget)
        while len(work) < len(self.running):  # a preemption shortens the list from its end
            sequence = self.running[len(work)]
            spare = budget - (len(self.running) - len(work) - 1)
            if sequence.slid:
                spare = min(spare, replay)
            count = min(sequence.pending, spare)
            pages = self._make_room(sequence, sequence.computed + count)
            if pages is not None:
                budget -= count
                work.append(self._work(sequence, count, pages))
        return work, budget

    def _replay_share(self, budget: int) -> int:
        """Most tokens of one replay. They have no end: together they leave half to prompts, if any."""
        replays = sum(sequence.slid for sequence in self.running)
        spare = budget - (len(self.running) - replays)
        if self.waiting or replays < len(self.running):
            spare = -(-spare // 2)
        return max(1, spare // max(1, replays))

    def _admit_waiting(self, budget: int, copies: list[tuple[int, int]]) -> list[Work]:
        """The work of waiting sequences that can start, the oldest first; the first that cannot ends it."""
        work: list[Work] = []
        if budget and len(self.running) < self.maximum_running:
            for sequence in [s for s in self.waiting if s.leader is None or _prompt_is_computed(s.leader)]:
                if not budget or len(self.running) == self.maximum_running:
                    break
                admitted = self._admit(sequence, budget, copies)
                if admitted is None:
                    break
                budget -= admitted.count
                work.append(admitted)
        return work

    def commit(self, plan: Plan, token_ids: Iterable[int | None]) -> None:
        """The forward has computed the plan, and these tokens were drawn, one for each of `plan.sampling`.

        None for a token that could not be drawn ends its sequence with an error.
        """
        self._release_sources(plan)
        tokens = iter(token_ids)
        for work in plan.work:
            sequence = work.sequence
            sequence.computed += work.count
            if work.admitted and not sequence.preempted:
                sequence.cached_tokens = work.begin
            self._publish(sequence)
        for work in plan.work:
            if work.samples:
                self._accept(work.sequence, next(tokens))

    def abort(self, plan: Plan) -> None:
        """The forward failed: give back what `plan` took."""
        self._release_sources(plan)
        for work in reversed(plan.work):
            sequence = work.sequence
            if work.admitted:
                self._leave(sequence)
                self._enqueue(sequence)
            else:
                self.pool.release(work.new_pages[::-1])
                del sequence.pages[len(sequence.pages) - len(work.new_pages) :]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, waiting or running, and let go of its pages; nothing if it has ended."""
        if sequence.finish is not None:
            return
        if sequence.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.finish = reason
        sequence.leader = None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _make_room(self, sequence: Sequence, tokens: int) -> list[int] | None:
        """New pages of a running sequence for its first `tokens`; None if it had to give way itself."""
        needed = self._pages_for(tokens) - len(sequence.pages)
        while needed > self.pool.free_count:
            youngest = self.running[-1]
            self._leave(youngest)
            youngest.preempted = True
            self._enqueue(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return None
        pages = self.pool.take(needed) if needed > 0 else []
        sequence.pages += pages
        return pages

    def _work(self, sequence: Sequence, count: int, pages: list[int], admitted: bool = False) -> Work:
        samples = count == sequence.pending
        return Work(sequence, sequence.computed, count, samples, tuple(pages), admitted)

    def _admit(self, sequence: Sequence, budget: int, copies: list[tuple[int, int]]) -> Work | None:
        """Start a waiting sequence on whatever the cache holds of it, if its whole window finds room."""
        shared = self._shared_pages(sequence) if self.prefix_cache else []
        # The last token is computed in any case, for its logits: if its page is shared, it is copied first.
        source = shared.pop() if len(shared) * self.page_size == sequence.pending else None
        needed = self._pages_for(sequence.pending) - len(shared)
        if source is not None and needed > self.pool.free_count:
            self.pool.release([source])  # a pool of one context has no room for a page and its copy
            source = None
        if needed > self.pool.free_count:
            self.pool.release(shared[::-1])
            return None
        computed = len(shared) * self.page_size if source is None else sequence.pending - 1
        count = min(sequence.pending - computed, budget)
        pages = self.pool.take(self._pages_for(computed + count) - len(shared))
        if source is not None:
            copies.append((source, pages[0]))
        sequence.computed, sequence.pages = computed, shared + pages
        sequence.running, sequence.leader = True, None
        self.waiting.remove(sequence)
        self._insert(self.running, sequence)
        return self._work(sequence, count, pages, admitted=True)

    def _shared_pages(self, sequence: Sequence) -> list[int]:
        pages: list[int] = []
        for key in sequence.page_keys(self.page_size, sequence.pending // self.page_size):
            page = self.pool.share(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def _publish(self, sequence: Sequence) -> None:
        """Let pages that this step filled be found; windows that slid are not worth finding."""
        if not self.prefix_cache or sequence.slid:
            return
        full = sequence.computed // self.page_size
        for index in range(sequence.published, full):
            key = sequence.page_keys(self.page_size, full)[index]
            if not self.pool.is_published(sequence.pages[index]):
                self.pool.publish(sequence.pages[index], key)
        sequence.published = full

    def _accept(self, sequence: Sequence, token_id: int | None) -> None:
        if token_id is None:
            self.finish(sequence, "error")
            return
        if token_id == self.end_of_text_id:
            self.finish(sequence, "stop")
            return
        sequence.append(token_id)
        request, size = sequence.request, len(sequence.tokens) - sequence.start
        full = request.overflow == "stop" and size == self.capacity
        if full or sequence.generated_tokens == request.max_new_tokens:
            self.finish(sequence, "length")
        elif size > self.capacity:
            kept = self.capacity if request.overflow == "slide" else -(-self.capacity // 2)
            self.pool.release(sequence.pages[::-1])
            sequence.slide(len(sequence.tokens) - kept)

    def _leave(self, sequence: Sequence) -> None:
        """Out of the running ones, without pages."""
        self.running.remove(sequence)
        self.pool.release(sequence.pages[::-1])  # the prefix last, to be kept longest
        sequence.clear()
        sequence.running = False

    def _enqueue(self, sequence: Sequence) -> None:
        self._insert(self.waiting, sequence)

    @staticmethod
    def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
        sequences.append(sequence)
        sequences.sort(key=lambda s: s.arrival)

    def _release_sources(self, plan: Plan) -> None:
        self.pool.release([source for source, _ in plan.copies])


def _prompt_is_computed(leader: Sequence) -> bool:
    return leader.finish is not None or leader.generated_tokens > 0
