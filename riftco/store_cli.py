"""`riftco store`: look at the store, check it, name things in it, and move them in and out."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from artifacts import Ref, Store, StoreError
from artifacts.fsck import check_store
from artifacts.garbage import collect
from artifacts.lineage import Lineage
from riftco.commands import user_errors
from riftco.errors import InputError
from riftco.log import log_to_terminal
from riftco.progress import show_progress

store_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look at the store, check it, tag results, free space, and move results in and out. "
    "The store is the folder in $RIFTCO_STORE, else .riftco/store.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be done.")]
Name = Annotated[str, typer.Argument(help="A tag, run/stage, artifact id or digest.", metavar="NAME")]
Names = Annotated[
    list[str] | None,
    typer.Argument(help="Runs, run/stages, tags or artifacts; everything without.", metavar="[NAME]..."),
]
Url = Annotated[
    str, typer.Argument(help="s3://bucket/path, gs://bucket/path or file:///folder.", metavar="URL")
]


@store_app.command("ls")
def list_store(as_json: Json = False) -> None:
    """List tags and runs, and how much the store holds."""
    with user_errors():
        store = Store.open()
        sizes = [store.objects.size(digest) for digest in store.digests()]
        runs = {run: store.run_stages(run) for run in store.runs()}
        if as_json:
            _print_json(
                {
                    "store": str(store.root),
                    "objects": len(sizes),
                    "bytes": sum(sizes),
                    "tags": {name: _ref_json(ref) for name, ref in store.tags().items()},
                    "runs": {
                        run: {
                            stage: {name: _ref_json(ref) for name, ref in made.record.results.items()}
                            for stage, made in stages.items()
                        }
                        for run, stages in runs.items()
                    },
                }
            )
            return
        table = Table("name", "kind", "object", box=None)
        for name, ref in store.tags().items():
            table.add_row(name, f"tag of a {ref.kind}", ref.digest[:12])
        for run, stages in runs.items():
            for stage, made in stages.items():
                for result, ref in made.record.results.items():
                    table.add_row(f"{run}/{stage}/{result}", ref.kind, ref.digest[:12])
        Console().print(table)
        typer.echo(f"{len(sizes)} objects, {_readable(sum(sizes))}, in {store.root}")


@store_app.command("show")
def show_object(name: Name, as_json: Json = False) -> None:
    """Show what an object is, where it lies, what it is called and which step made it."""
    with user_errors():
        store = Store.open()
        ref = store.resolve(name)
        lineage = Lineage(store)
        makers = lineage.origin(ref).makers
        facts = {
            **_ref_json(ref),
            "bytes": store.path(ref).stat().st_size,
            "path": str(store.path(ref)),
            "artifact_ids": [found for found, other in store.artifacts().items() if other == ref],
            "tags": [tag for tag, other in store.tags().items() if other == ref],
            "made_by": [
                {"step": made.step, "key": key, "seconds": made.seconds, "named": lineage.names.get(key, [])}
                for key, made in makers.items()
            ],
        }
        if as_json:
            _print_json(facts)
            return
        for fact, value in facts.items():
            if fact != "made_by":
                typer.echo(f"{fact:13} {', '.join(value) if isinstance(value, list) else value}")
        for made in facts["made_by"]:
            names = ", ".join(made["named"]) or "unnamed"
            typer.echo(f"made_by       {made['step']} in {made['seconds']} s, {names}")


@store_app.command("verify")
def verify_objects(
    names: Annotated[list[str], typer.Argument(help="Runs or objects to check.", metavar="NAME...")],
    as_json: Json = False,
) -> None:
    """Hash the objects of runs, stages, tags or ids and read bundles; exit code 2 if anything is wrong."""
    with user_errors():
        store = Store.open()
        counts = {name: verify_name(store, name) for name in names}
        if as_json:
            _print_json({name: {"intact": count} for name, count in counts.items()})
        else:
            typer.echo("\n".join(f"{name}: {count} intact" for name, count in counts.items()))


def verify_name(store: Store, name: str) -> int:
    """Check the objects of a run, or the one of another name; how many there were. StoreError otherwise."""
    run = name.removeprefix("runs/")
    refs = [store.resolve(name)] if run not in store.runs() else []
    if not refs:
        refs = [ref for stage in store.run_stages(run).values() for ref in stage.record.results.values()]
    for ref in refs:
        store.load_bundle(ref) if ref.kind == "bundle" else store.check(ref)
    return len(refs)


@store_app.command()
def fsck(
    full: Annotated[bool, typer.Option("--full", help="Also hash every object.")] = False,
    as_json: Json = False,
) -> None:
    """Check the whole store: references readable, objects there, and with --full what they are called.

    Changes nothing. Exit code 2 if something is wrong; running a step again replaces what is damaged.
    """
    with user_errors(), _progress("fsck", size=True) as progress:
        store = Store.open()
        checked = check_store(store, full=full, progress=progress)
        if as_json:
            _print_json(asdict(checked))
        else:
            for problem in checked.problems:
                typer.echo(f"{problem.code}: {problem.where}: {problem.message}")
            state = f"{len(checked.problems)} problems" if checked.problems else "clean"
            depth = "hashed" if full else "not hashed, --full does that"
            typer.echo(
                f"{store.root}: {state}; {checked.references} references, {checked.objects} objects, "
                f"{_readable(checked.size)} ({depth})"
            )
        if checked.problems:
            raise typer.Exit(2)


@store_app.command()
def gc(
    unnamed: Annotated[
        bool, typer.Option("--unnamed", help="Also forget steps that no run and no tag reaches.")
    ] = False,
    keep_days: Annotated[int, typer.Option(min=0, help="Days that the quarantine keeps objects.")] = 7,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Free space: move what no reference reaches into quarantine, and delete what was put there long ago.

    Every finished step is a reference, so that it need not run again. To free the space of old runs: `riftco
    store forget RUN`, then `riftco store gc --unnamed`. Until the quarantine is purged, nothing is lost: what
    is named again comes back from there.
    """
    with user_errors(), _progress("gc") as progress:
        store = Store.open()
        done = collect(store, unnamed=unnamed, keep_days=keep_days, dry_run=dry_run, progress=progress)
        if as_json:
            _print_json(asdict(done) | {"dry_run": dry_run})
            return
        for line in [*done.references, *done.objects] if dry_run else []:
            typer.echo(line)
        verb = "would move" if dry_run else "moved"
        typer.echo(
            f"{verb} {len(done.objects)} objects ({_readable(done.size)}) into quarantine, forget "
            f"{len(done.references)} references, delete {len(done.temporary)} temporary files and "
            f"{len(done.purged)} days of quarantine"
        )


@store_app.command()
def forget(
    run: Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")], dry_run: DryRun = False
) -> None:
    """Remove the names of a run. Its results stay until `riftco store gc --unnamed`."""
    with user_errors():
        store = Store.open()
        stages = store.run_stages(run.removeprefix("runs/"))
        if not stages:
            raise InputError(f"no run is called {run!r}; the runs are {', '.join(store.runs()) or 'none'}")
        if not dry_run:
            store.forget(run.removeprefix("runs/"))
        typer.echo(f"{'would forget' if dry_run else 'forgot'} {', '.join(stages)} of {run}")


@store_app.command("tag")
def tag_object(
    tag: Annotated[str | None, typer.Argument(help="The tag; all tags without it.", metavar="[TAG]")] = None,
    name: Annotated[str | None, typer.Argument(help="What it is to mean.", metavar="[NAME]")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Let the tag mean nothing any more.")] = False,
    expect: Annotated[
        str | None, typer.Option(help="Only if the tag means this now; 'none' for a new tag.", metavar="NAME")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Give a result a name that stays when runs move on: `riftco store tag best demo/post-train`.

    A tag moves by compare-and-swap: of several who move it at once, one succeeds and the others are told.
    """
    with user_errors():
        store = Store.open()
        if tag is None or (name is None and not remove):
            _show_tags(store, tag, as_json)
            return
        before = store.tag(tag)
        current = before.ref if before else None
        if expect and current != (None if expect == "none" else store.resolve(expect)):
            raise StoreError("tag-moved", f"tag {tag} means {current.digest if current else 'nothing'} now")
        ref = None if remove else store.resolve(str(name))
        if not dry_run:
            store.set_tag(tag, ref, after=before)
        old, new = (other.digest[:12] if other else "nothing" for other in (current, ref))
        if as_json:
            _print_json({"tag": tag, "before": old, "after": new, "dry_run": dry_run})
        else:
            typer.echo(f"{tag}: {old} -> {new}{' (dry run)' if dry_run else ''}")


def _show_tags(store: Store, tag: str | None, as_json: bool) -> None:
    tags = store.tags()
    if tag is not None and tag not in tags:
        raise InputError(f"no tag is called {tag!r}; the tags are {', '.join(tags) or 'none'}")
    shown = {found: ref for found, ref in tags.items() if tag in (None, found)}
    if as_json:
        _print_json({found: _ref_json(ref) for found, ref in shown.items()})
        return
    for found, ref in shown.items():
        typer.echo(f"{found} {ref.digest} {ref.kind}")


@store_app.command("put")
def put_file(
    path: Annotated[Path, typer.Argument(help="The file to store.", metavar="FILE")],
    kind: Annotated[str, typer.Option(help="A short word for what it is.")] = "file",
    tag: Annotated[str | None, typer.Option(help="Tag it too, or the next gc takes it.")] = None,
) -> None:
    """Store a copy of a file and print its digest; a `.rift` bundle becomes an artifact."""
    with user_errors():
        from artifacts import ModelBundle

        store = Store.open()
        ref = (
            store.put_bundle(ModelBundle.load(path)) if path.suffix == ".rift" else store.put_file(kind, path)
        )
        if tag:
            store.set_tag(tag, ref, after=store.tag(tag))
        typer.echo(ref.digest)


@store_app.command("get")
def get_object(
    name: Name, output: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")]
) -> None:
    """Write a checked copy of an object to a file."""
    with user_errors():
        store = Store.open()
        typer.echo(store.get(store.resolve(name), output))


@store_app.command("export")
def export_archive(
    output: Annotated[Path, typer.Argument(help="The archive to write.", metavar="FILE.tar")],
    names: Names = None,
) -> None:
    """Write runs, tags or artifacts, with all they were made from, into one file for `store import`."""
    with user_errors(), _progress("export", size=True) as progress:
        from artifacts.archive import export

        done = export(Store.open(), output, names or (), progress=progress)
        typer.echo(f"{output}: {done.objects} objects, {_readable(done.bytes)}, {done.references} references")


@store_app.command("import")
def import_archive(
    path: Annotated[Path, typer.Argument(help="An archive of `store export`.", metavar="FILE.tar")],
) -> None:
    """Add everything in an archive to the store; every object is checked on the way in."""
    with user_errors(), _progress("import", size=True) as progress:
        from artifacts.archive import import_

        done = import_(Store.open(), path, progress=progress)
        typer.echo(f"{done.objects} objects, {_readable(done.bytes)}, {done.references} references")


@store_app.command()
def push(url: Url, names: Names = None, as_json: Json = False) -> None:
    """Copy runs, tags or artifacts, with all they were made from, to a store elsewhere.

    What is there already is skipped, so that a push that was stopped goes on when it is given again.
    """
    _transfer("push", url, names, as_json)


@store_app.command()
def pull(url: Url, names: Names = None, as_json: Json = False) -> None:
    """Copy runs, tags or artifacts, with all they were made from, from a store elsewhere to this one."""
    _transfer("pull", url, names, as_json)


def _transfer(direction: str, url: str, names: list[str] | None, as_json: bool) -> None:
    with user_errors(), _progress(direction, size=True) as progress:
        from artifacts import transfer
        from artifacts.remote import RemoteStore

        move = transfer.push if direction == "push" else transfer.pull
        remote = RemoteStore.open(url, writable=direction == "push")
        done = move(Store.open(), remote, names or (), progress=progress)
        if as_json:
            _print_json(asdict(done))
        else:
            typer.echo(
                f"{direction}: copied {done.objects} objects ({_readable(done.bytes)}) and "
                f"{done.references} references, {done.skipped} were there already"
            )


@contextmanager
def _progress(title: str, *, size: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Shows what is done of a number of things, or with `size` of bytes, as MiB."""
    log_to_terminal()
    scale, unit = (1 << 20, ", MiB") if size else (1, "")
    with show_progress() as report:

        def progress(done: int, total: int, what: str) -> None:
            report(f"{title}{unit}", done // scale, -(-total // scale), {})

        yield progress


def _ref_json(ref: Ref) -> dict[str, Any]:
    return {"kind": ref.kind, "digest": ref.digest}


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _readable(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
