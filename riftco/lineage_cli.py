"""`riftco lineage`, `why` and `diff`: how a result came about, why it changed, and in what."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from artifacts import Ref, Store, StoreError
from artifacts.bundle_diff import BundleDifference, bundle_difference
from artifacts.lineage import ABSENT, Change, Lineage, changes, shortened
from artifacts.records import is_name
from riftco.commands import Json, open_bundle, print_json, print_table, user_errors


def lineage(
    name: Annotated[str, typer.Argument(help="A tag, run/stage, artifact id or digest.", metavar="NAME")],
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid diagram for Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Show what an object was made from, step by step, down to the data.

    Examples: `riftco lineage demo/post-train`, `riftco lineage best --mermaid`
    """
    with user_errors():
        store = Store.open(create=False)
        graph = Lineage(store)
        ref = store.resolve(name)
        if mermaid:
            typer.echo("\n".join(_mermaid(graph, ref)))
        elif as_json:
            print_json([_origin_json(graph, each) for each in graph.upstream([ref])])
        else:
            Console().print(_tree(graph, ref, Tree(_label(ref)), set()))


def why(
    name: Annotated[str, typer.Argument(help="A stage of a run.", metavar="RUN/STAGE")], as_json: Json = False
) -> None:
    """Say which setting or input made a stage run again: what changed in its recipe since the time before."""
    with user_errors():
        store = Store.open(create=False)
        run, _, stage = name.removeprefix("runs/").partition("/")
        stages = store.run_stages(run)
        made = store.stage(run, stage) if is_name(stage) else None
        if made is None:
            known = ", ".join(f"{run}/{known}" for known in stages) or ", ".join(store.runs())
            raise StoreError("unknown", f"no stage is called {name!r}; there are {known or 'none'}")
        before = Lineage(store).record(made.previous) if made.previous else None
        changed = changes(_recipe(before), _recipe(made.record)) if before else []
        if as_json:
            gone = made.previous is not None and before is None
            shown = None if gone else [_change_json(change, "before", "after") for change in changed]
            print_json({"key": made.key, "previous": made.previous, "changes": shown})
        elif made.previous is None:
            typer.echo(f"{name} has had one recipe only: step {made.record.step}, key {made.key[:12]}")
        elif before is None:
            typer.echo(f"the recipe before, {made.previous[:12]}, is no longer in the store")
        else:
            _print_changes(changed)


def diff(
    first: Annotated[str, typer.Argument(help="A .rift file, or a name in the store.", metavar="A")],
    second: Annotated[str, typer.Argument(help="Another.", metavar="B")],
    as_json: Json = False,
) -> None:
    """Compare two bundles: config, tokenizer, metadata, and how far each tensor moved.

    Example: `riftco diff demo/pretrain demo/post-train`
    """
    with user_errors():
        difference = bundle_difference(open_bundle(first), open_bundle(second))
        if as_json:
            print_json(_difference_json(difference))
            return
        _print_changes(difference.fields)
        rows = [("tensor", "|B - A|", "/ |A|", "largest")]
        for tensor in difference.tensors:
            if math.isinf(tensor.norm):
                rows.append((tensor.name, "other shape", "", ""))
                continue
            relative = "from zero" if math.isinf(tensor.relative) else f"{tensor.relative:.2%}"
            rows.append((tensor.name, f"{tensor.norm:.4g}", relative, f"{tensor.largest:.3g}"))
        print_table(rows)
        typer.echo(f"{len(difference.tensors)} of {difference.tensor_count} tensors differ")


def _tree(graph: Lineage, ref: Ref, branch: Tree, seen: set[str]) -> Tree:
    makers = graph.origin(ref).makers
    if ref.digest in seen and makers:
        branch.add("[dim]shown above[/dim]")
        return branch
    seen.add(ref.digest)
    for key, record in makers.items():
        names = ", ".join(graph.names.get(key, [])) or "unnamed"
        step = branch.add(f"[bold]{escape(record.step)}[/bold] {record.seconds:.1f} s, {escape(names)}")
        for place, read in record.inputs().items():
            _tree(graph, read, step.add(f"{escape(place)}: {_label(read)}"), seen)
    return branch


def _label(ref: Ref) -> str:
    return escape(f"{ref.kind} {ref.digest[:12]}")


def _mermaid(graph: Lineage, ref: Ref) -> Iterator[str]:
    yield "flowchart LR"
    drawn = set()
    for origin in graph.upstream([ref]):
        yield f'  {_node(origin.ref)}["{origin.ref.kind}<br>{origin.ref.digest[:8]}"]'
        for key, record in origin.makers.items():
            if key not in drawn:
                drawn.add(key)
                yield f'  s{key[:12]}(["{record.step}"])'
                yield from (f"  {_node(read)} --> s{key[:12]}" for read in record.inputs().values())
            yield f"  s{key[:12]} --> {_node(origin.ref)}"


def _node(ref: Ref) -> str:
    return f"o{ref.digest[:12]}"


def _origin_json(graph: Lineage, origin: Any) -> dict[str, Any]:
    return {
        "kind": origin.ref.kind,
        "digest": origin.ref.digest,
        "made_by": [
            {
                "key": key,
                "step": record.step,
                "version": record.version,
                "seconds": record.seconds,
                "named": graph.names.get(key, []),
                "recipe": record.recipe,
            }
            for key, record in origin.makers.items()
        ],
    }


def _recipe(record: Any) -> dict[str, Any]:
    return {"step": record.step, "version": record.version, **record.recipe}


def _print_changes(changed: list[Change]) -> None:
    for place, before, after in changed:
        typer.echo(f"{place}: {shortened(before)} -> {shortened(after)}")


def _change_json(change: Change, first: str, second: str) -> dict[str, Any]:
    """The change with its two values under these names; a value that is absent is left out."""
    place, before, after = change
    return {"field": place} | {
        side: value for side, value in ((first, before), (second, after)) if value is not ABSENT
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _difference_json(difference: BundleDifference) -> dict[str, Any]:
    return {
        "fields": [_change_json(change, "a", "b") for change in difference.fields],
        "tensors": {
            tensor.name: {
                "norm": _finite(tensor.norm),
                "relative": _finite(tensor.relative),
                "largest": _finite(tensor.largest),
            }
            for tensor in difference.tensors
        },
        "tensor_count": difference.tensor_count,
    }
