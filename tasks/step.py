"""A step: a plain function whose results the store keeps under a key made of everything they depend on.

    @step(version=1, ignore=("config.evaluation_interval",))
    def pretrain(work: Work, corpus: Ref, config: PretrainingConfig) -> Results: ...

    results = pretrain(corpus=corpus, config=config)         # {"bundle": Ref, ...}
    sweep = tune_rank.map(rank=[2, 8], base=base)            # one call per element of the lists

A call is handed to the runner whose `with` block is open (`tasks.runner`, `tasks.plan`,
`tasks.prefect_runner`), so that a DAG is one plain function which can be run here, only planned, or run under
Prefect. The key is `artifacts.step_key(name, version, recipe)`; the recipe is the arguments, references by
kind and digest and settings field by field, without the fields in `ignore`, which cannot change the results.
The version is raised by hand when the body computes something else: a hash of the source would miss changed
helpers and rerun everything for a changed comment.

Needs neither torch nor Prefect, for a plan must be quick.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec

from pydantic import BaseModel

from artifacts import Ref
from tasks.call import Call, Results, Runner, Work, active_runner

Parameters = ParamSpec("Parameters")
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,40}")


class Step(Generic[Parameters]):
    """A function turned into a step; `step` makes it."""

    def __init__(
        self,
        body: Callable[Concatenate[Work, Parameters], Results],
        version: int,
        ignore: Sequence[str] = (),
        stage: str | None = None,
    ) -> None:
        self.body = body
        """The function itself, to be called alone: `pretrain.body(work, corpus=...)`."""
        self.name = body.__name__.replace("_", "-")
        self.version = version
        self.ignore = tuple(ignore)
        self.stage = stage or self.name
        self._signature = self._checked_signature()

    def _checked_signature(self) -> inspect.Signature:
        signature = inspect.signature(self.body)
        parameters = list(signature.parameters.values())
        if not parameters or parameters.pop(0).name != "work":
            raise TypeError(f"step {self.name}: the first parameter must be `work`")
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise TypeError(f"step {self.name}: every argument needs a parameter of its own, for the key")
        if type(self.version) is not int or self.version < 1:
            raise TypeError(f"step {self.name}: version must be a whole number from 1, got {self.version!r}")
        return signature.replace(parameters=parameters)

    def named(self, stage: str) -> "Step[Parameters]":
        """The same step under another stage name, for a DAG that calls it twice; its keys stay the same."""
        return Step(self.body, self.version, self.ignore, stage)

    def __call__(self, *args: Parameters.args, **arguments: Parameters.kwargs) -> Results:
        """Run, plan or submit the step, as the active runner decides.

        Raises TypeError for an argument without a stable JSON form, RuntimeError where no runner is active.
        """
        return self._runner().run(self._call(self._signature.bind(*args, **arguments)))

    def map(self, **arguments: Any) -> list[Results]:
        """One call for each element of the arguments given as lists, which are of one length.

        A tuple is passed whole. The stages are called after the elements: `tune-rank-2`, `tune-rank-8`.
        """
        lists = {name: value for name, value in arguments.items() if isinstance(value, list)}
        if len({len(values) for values in lists.values()}) != 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in lists.items()) or "none"
            raise ValueError(f"{self.name}.map needs lists of one length, got {lengths}")
        calls = []
        for index, elements in enumerate(zip(*lists.values(), strict=True)):
            bound = self._signature.bind(**arguments | dict(zip(lists, elements, strict=True)))
            calls.append(self._call(bound, _label(elements, index)))
        return self._runner().run_all(calls)

    def _call(self, bound: inspect.BoundArguments, label: str = "") -> Call:
        bound.apply_defaults()
        recipe = {name: _plain(value) for name, value in bound.arguments.items()}
        for path in self.ignore:
            self._leave_out(recipe, path)
        names = [self.stage, label] if label else [self.stage]
        arguments = dict(bound.arguments)
        return Call(self.name, self.version, self.body, arguments, recipe, "-".join(names), " ".join(names))

    def _leave_out(self, recipe: dict[str, Any], path: str) -> None:
        *parents, field = path.split(".")
        holder: Any = recipe
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or field not in holder:
            raise TypeError(f"step {self.name} ignores {path!r}, which its arguments do not have")
        del holder[field]

    def _runner(self) -> Runner:
        try:
            return active_runner.get()
        except LookupError:
            raise RuntimeError(
                f"step {self.name} was called where no runner is active: `with PlainRunner(store, run): ...`"
            ) from None


def step(
    *, version: int, ignore: Sequence[str] = ()
) -> Callable[[Callable[Concatenate[Work, Parameters], Results]], Step[Parameters]]:
    """Decorator: the function becomes a step of its name, with dashes for underscores.

    version: raised whenever the body computes something else from the same arguments.
    ignore: dotted paths, from an argument on (`config.evaluation_interval`), that cannot change the results.
    """
    return lambda body: Step(body, version, ignore)


def main_result(results: Results) -> Ref:
    """The first of a step's results. In a plan it may not be known, and something stands for it."""
    return next(iter(results.values())) if results else results["main"]


def _plain(value: Any) -> Any:
    """References, settings and tuples as plain JSON; anything else unstable is left for the key to refuse."""
    if isinstance(value, Ref):
        return {"kind": value.kind, "digest": value.digest}
    if isinstance(value, BaseModel):
        # Field by field rather than model_dump(), which makes a list of a set in the order of its hashes.
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    return value


def _label(elements: Sequence[Any], index: int) -> str:
    """What tells a mapped call from the others: its words and numbers, else its position."""
    label = "-".join(str(element) for element in elements if isinstance(element, str | int | float))
    return label if _LABEL.fullmatch(label) else str(index)
