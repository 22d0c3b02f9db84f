"""Who made what from what: the graph that step records draw between objects.

An object is made by steps, whose recipes name the objects they read. The graph is read once from all records,
those that only the name of a run still holds included.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifacts.records import Ref, StepRecord

if TYPE_CHECKING:
    from artifacts.store import Store


@dataclass(frozen=True)
class Origin:
    """An object with the steps that made it; what they read follows from their records."""

    ref: Ref
    makers: dict[str, StepRecord]
    """By key; none for what came from outside, more than one if several recipes gave the same bytes."""


class Lineage:
    """The graph of a store as it is when this is made."""

    def __init__(self, store: "Store") -> None:
        self._records = store.steps()
        self.names: dict[str, list[str]] = {}
        """Key -> the `run/stage` names it has."""
        for run in store.runs():
            for stage, made in store.run_stages(run).items():
                self._records.setdefault(made.key, made.record)
                self.names.setdefault(made.key, []).append(f"{run}/{stage}")
        self._makers: dict[str, list[str]] = {}
        for key, record in self._records.items():
            for ref in record.results.values():
                self._makers.setdefault(ref.digest, []).append(key)

    def record(self, key: str) -> StepRecord | None:
        """The record of a key, if the store has it."""
        return self._records.get(key)

    def origin(self, ref: Ref) -> Origin:
        """The object and what made it."""
        return Origin(ref, {key: self._records[key] for key in self._makers.get(ref.digest, ())})

    def upstream(self, refs: Iterable[Ref]) -> list[Origin]:
        """The objects, everything their makers read, and so on; each once, nearest first."""
        waiting = list(refs)
        origins: dict[str, Origin] = {}
        for ref in waiting:  # grows while we walk
            if ref.digest not in origins:
                origins[ref.digest] = origin = self.origin(ref)
                for record in origin.makers.values():
                    waiting += record.inputs().values()
        return list(origins.values())


Change = tuple[str, object, object]
"""A place in a recipe, with what was there before and after."""


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands for the value of a place that one of the two does not have."""


def shortened(value: object) -> str:
    """One side of a change for people: text as it is, all else as JSON, without its end if it is long."""
    text = str(value) if value is ABSENT or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 70 else f"{text[:60]}… ({len(text)} characters)"


def changes(before: object, after: object, place: str = "") -> list[Change]:
    """Everything that differs between two values of plain JSON, down to single fields."""
    if isinstance(before, list) and isinstance(after, list):
        return changes(dict(enumerate(before)), dict(enumerate(after)), place)
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if type(before) is type(after) and before == after else [(place, before, after)]
    found = []
    for key in [*before, *(key for key in after if key not in before)]:
        inner = f"{place}.{key}" if place else str(key)
        found += changes(before.get(key, ABSENT), after.get(key, ABSENT), inner)
    return found
