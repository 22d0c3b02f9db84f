"""`riftco lineage`, `why` and `diff`: how a result came about, why it changed, and in what."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from artifacts import Ref, Store, StoreError
from artifacts.bundle_diff import BundleDifference, bundle_difference
from artifacts.lineage import Lineage, changes
from riftco.commands import open_bundle, user_errors

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def lineage(
    name: Annotated[str, typer.Argument(help="A tag, run/stage, artifact id or digest.", metavar="NAME")],
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid diagram for Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Show what an object was made from, step by step, down to the data.

    Examples: `riftco lineage demo/post-train`, `riftco lineage best --mermaid`
    """
    with user_errors():
        store = Store.open()
        graph = Lineage(store)
        ref = store.resolve(name)
        if mermaid:
            typer.echo("\n".join(_mermaid(graph, ref)))
        elif as_json:
            typer.echo(json.dumps([_origin_json(graph, each) for each in graph.upstream([ref])], indent=2))
        else:
            Console().print(_tree(graph, ref, Tree(_label(ref)), set()))


def why(
    name: Annotated[str, typer.Argument(help="A stage of a run.", metavar="RUN/STAGE")], as_json: Json = False
) -> None:
    """Say which setting or input made a stage run again: what changed in its recipe since the time before."""
    with user_errors():
        store = Store.open()
        run, _, stage = name.removeprefix("runs/").partition("/")
        made = store.run_stages(run).get(stage)
        if made is None:
            known = ", ".join(f"{run}/{known}" for known in store.run_stages(run)) or ", ".join(store.runs())
            raise StoreError("unknown", f"no stage is called {name!r}; there are {known or 'none'}")
        before = Lineage(store).record(made.previous) if made.previous else None
        changed = changes(_recipe(before), _recipe(made.record)) if before else []
        if as_json:
            typer.echo(json.dumps({"key": made.key, "previous": made.previous, "changes": changed}, indent=2))
            return
        if made.previous is None:
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
            typer.echo(json.dumps(_difference_json(difference), indent=2))
            return
        _print_changes(difference.fields)
        table = Table("tensor", "|B - A|", "/ |A|", "largest", box=None)
        for tensor in difference.tensors:
            table.add_row(
                tensor.name, f"{tensor.norm:.4g}", f"{tensor.relative:.2%}", f"{tensor.largest:.3g}"
            )
        Console().print(table)
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
    return f"{ref.kind} {ref.digest[:12]}"


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


def _print_changes(changed: list[tuple[str, object, object]]) -> None:
    for place, before, after in changed:
        typer.echo(f"{place}: {_shortened(before)} -> {_shortened(after)}")


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 70 else f"{text[:60]}… ({len(text)} characters)"


def _difference_json(difference: BundleDifference) -> dict[str, Any]:
    return {
        "fields": [{"field": place, "a": a, "b": b} for place, a, b in difference.fields],
        "tensors": {
            tensor.name: {"norm": tensor.norm, "relative": tensor.relative, "largest": tensor.largest}
            for tensor in difference.tensors
        },
        "tensor_count": difference.tensor_count,
    }
