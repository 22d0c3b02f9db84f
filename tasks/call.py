"""What travels from a step to a runner: the call, what its body may use, and which runner is active."""

import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from artifacts import Ref, Store, Workspace, step_key

Results = dict[str, Ref]
"""Named results of a step, the main one first."""


class Progress(Protocol):
    """How a body says how far it is: `progress(40, 400, loss=1.25)`."""

    def __call__(self, done: int, total: int, **numbers: float) -> None: ...


@dataclass(frozen=True)
class Work:
    """What the body of a step may use besides its arguments. None of it is part of the key."""

    store: Store
    run: str
    """Name of the run, for titles and messages; a result must not depend on it."""
    log: logging.Logger
    progress: Progress
    """Call it at every unit of long work: it is also where an interruption reaches a body in a thread."""
    workspace: Workspace
    """Where long work keeps what it goes on from when it is run again; empty once the results are stored."""
    folder: Path
    """Where people find what the stage leaves besides its results, such as the table of its metrics."""


@dataclass(frozen=True)
class Unmade:
    """Stands in a plan for a reference that does not exist yet; no body ever sees one."""

    stage: str
    """The stage that would make it."""


@dataclass(frozen=True)
class Call:
    """One call of a step with its arguments, not yet run."""

    step: str
    version: int
    body: Callable[..., Results]
    arguments: dict[str, Any]
    recipe: dict[str, Any]
    """Argument -> plain JSON; while it holds an `Unmade` there is no key."""
    stage: str
    """Unique in the run: the name under which the run keeps the results, such as `tune-rank-8`."""
    title: str
    """The same for people: `tune-rank 8`."""

    @property
    def key(self) -> str:
        """Identity of the results, 64 hex digits; TypeError names an argument without a stable JSON form."""
        try:
            return step_key(self.step, self.version, self.recipe)
        except TypeError as error:
            raise TypeError(f"step {self.step} has no stable key: {error}") from error

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Stages that have to run before this call has a key, each once, in the order of the arguments."""
        return tuple(dict.fromkeys(leaf.stage for leaf in _leaves(self.recipe) if isinstance(leaf, Unmade)))


class Runner(ABC):
    """Decides what happens when a step is called; active while its `with` block is open."""

    def __init__(self, store: Store, run: str) -> None:
        """A runner for the run of that name."""
        self.store = store
        self.run_name = run
        self._claimed: dict[str, Call] = {}
        self._token: contextvars.Token[Runner] | None = None

    @abstractmethod
    def run(self, call: Call) -> Results:
        """The results of one call."""

    @abstractmethod
    def run_all(self, calls: Sequence[Call]) -> list[Results]:
        """The results of calls that do not depend on each other, in their order."""

    def claim(self, call: Call) -> None:
        """Raise ValueError if the run has another call of the same stage name: one would hide the other."""
        other = self._claimed.setdefault(call.stage, call)
        if (other.step, other.recipe) != (call.step, call.recipe):
            raise ValueError(
                f"two different calls are both called {call.stage!r}; give one of them a name of its own: "
                f"{call.step.replace('-', '_')}.named('...')(...)"
            )

    def __enter__(self) -> Self:
        """Raises ValueError for a run with the name of a tag: the tag would hide it."""
        if self.run_name in self.store.tags():
            raise ValueError(
                f"a tag is called {self.run_name}, which would hide the run: give the run another name, "
                f"or remove the tag: riftco store tag {self.run_name} --remove"
            )
        self._token = active_runner.set(self)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        assert self._token is not None, "left without being entered"
        active_runner.reset(self._token)


active_runner: contextvars.ContextVar[Runner] = contextvars.ContextVar("active_runner")


def _leaves(value: Any) -> Iterator[Any]:
    """Every value of a recipe that is neither a list nor a dictionary."""
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _leaves(child)
    else:
        yield value
