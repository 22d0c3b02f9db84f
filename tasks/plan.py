"""Says what a run would do, and why, without doing any of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from artifacts import Ref, Store
from artifacts.lineage import Change, changes, shortened
from riftco.errors import InputError
from tasks.call import Call, Results, Runner, Unmade
from tasks.runner import recall_intact, short

Status = Literal["cached", "damaged", "stale", "missing", "waiting"]


@dataclass(frozen=True)
class StagePlan:
    """What is known of one stage.

    cached: the results are in the store, intact. damaged: they were made, but one is missing or damaged.
    stale: this run made the stage before, from another recipe. missing: never made. waiting: an input is not
    there yet, so there is no key to look for.
    """

    stage: str
    title: str
    status: Status
    reason: str = ""
    """For people: the digest, the damage, what changed, or what it waits for."""
    changes: Sequence[Change] = ()
    """Of a stale stage: places in the recipe, with the value when it was made and the value now."""


class PlanRunner(Runner):
    """Runs nothing and writes nothing; `stages` fills as the DAG function calls its steps.

    Results of a step that is not cached are stood for by `Unmade`, so the DAG function runs to its end. A
    damaged step is taken to give the same results again.
    """

    def __init__(self, store: Store, run: str) -> None:
        super().__init__(store, run)
        self._made_before = store.run_stages(run)
        self.stages: list[StagePlan] = []
        self._names: set[str] = set()

    def run(self, call: Call) -> Results:
        """Note the stage's status; its results where they are known."""
        self.claim(call)
        self._names |= {call.stage, call.step}
        if call.waits_for:
            return self._unknown(call, "waiting", "for " + ", ".join(call.waits_for))
        record, damage = recall_intact(self.store, call.key)
        if record:
            return self._known(call, record.results, "cached", short(record.results))
        if damage and (record := self.store.recall(call.key)):
            return self._known(call, record.results, "damaged", damage)
        changed = self._changes(call)
        said = ", ".join(f"{place} {shortened(old)} -> {shortened(new)}" for place, old, new in changed)
        return self._unknown(call, "stale" if changed else "missing", said, changed)

    def run_all(self, calls: Sequence[Call]) -> list[Results]:
        """As `run`, for each call."""
        return [self.run(call) for call in calls]

    def require_stages(self, names: Iterable[str]) -> None:
        """InputError unless each of these is a stage or a step of the DAG."""
        for name in names:
            if name not in self._names:
                stages = ", ".join(stage.stage for stage in self.stages)
                raise InputError(f"no stage is called {name!r}; the stages are {stages}")

    def _known(self, call: Call, results: Results, status: Status, reason: str) -> Results:
        self.stages.append(StagePlan(call.stage, call.title, status, reason))
        return results

    def _unknown(self, call: Call, status: Status, reason: str, changed: Sequence[Change] = ()) -> Results:
        self.stages.append(StagePlan(call.stage, call.title, status, reason, changed))
        return _UnmadeResults(call.stage)

    def _changes(self, call: Call) -> list[Change]:
        """What differs between the recipe this run used for the stage before and the new one."""
        if call.stage not in self._made_before:
            return []
        record = self._made_before[call.stage].record
        before = {"step": record.step, "version": record.version, **record.recipe}
        return changes(before, {"step": call.step, "version": call.version, **call.recipe})


class _UnmadeResults(dict[str, Ref]):
    """Has whatever name it is asked for: the names of results are known only once they are made."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def __missing__(self, name: str) -> Ref:
        return cast(Ref, Unmade(self._stage))
