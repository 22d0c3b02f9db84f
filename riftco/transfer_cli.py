"""`riftco store export`, `import`, `push` and `pull`: moving results between stores."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from artifacts import RemoteStore, Store, pull, push
from artifacts.archive import export, import_
from artifacts.transfer import Transferred
from riftco.commands import DryRun, Json, print_json, readable, show_work, user_errors

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Runs, run/stages, tags or artifacts; everything without.", metavar="[NAME]..."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Of a tag moved in both places, let the one that is copied from decide."),
]
Url = Annotated[
    str, typer.Argument(help="s3://bucket/path, gs://bucket/path or file:///folder.", metavar="URL")
]


def export_archive(
    output: Annotated[Path, typer.Argument(help="The archive to write.", metavar="FILE.tar")],
    names: Names = None,
) -> None:
    """Write runs, tags or artifacts, with all they were made from, into one file for `store import`."""
    with user_errors(), show_work("export", size=True) as progress:
        done = export(Store.open(create=False), output, names or (), progress=progress)
        typer.echo(f"{output}: {done.objects} objects, {readable(done.bytes)}, {done.references} references")


def import_archive(
    path: Annotated[Path, typer.Argument(help="An archive of `store export`.", metavar="FILE.tar")],
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Add everything in an archive to the store; every object is checked on the way in.

    A run of the same name is replaced: `--dry-run` says which. What it meant stays until `riftco store gc
    --unnamed`.
    """
    with user_errors(), show_work("import", size=True) as progress:
        store = Store.preview() if dry_run else Store.open()
        done = import_(store, path, progress, force=force, dry_run=dry_run)
        _print_transferred("import", done, dry_run, as_json)


def push_to(
    url: Url, names: Names = None, force: Force = False, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Copy runs, tags or artifacts, with all they were made from, to a store elsewhere.

    A run of the same name is replaced there: `--dry-run` says which. What is there already is skipped, so
    that a push that was stopped goes on when it is given again.
    """
    with user_errors(), show_work("push", size=True) as progress:
        store = Store.open(create=False)
        store.select(names or ())  # a name that is unknown here makes no store there
        remote = RemoteStore.preview(url) if dry_run else RemoteStore.open(url, writable=True)
        done = push(store, remote, names or (), progress, force=force, dry_run=dry_run)
        _print_transferred("push", done, dry_run, as_json)


def pull_from(
    url: Url, names: Names = None, force: Force = False, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Copy runs, tags or artifacts, with all they were made from, from a store elsewhere to this one.

    A run of the same name is replaced: `--dry-run` says which. What it meant stays until `riftco store gc
    --unnamed`.
    """
    with user_errors(), show_work("pull", size=True) as progress:
        remote = RemoteStore.open(url)
        store = Store.preview() if dry_run else Store.open()
        done = pull(store, remote, names or (), progress, force=force, dry_run=dry_run)
        _print_transferred("pull", done, dry_run, as_json)


def _print_transferred(what: str, done: Transferred, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done) | {"dry_run": dry_run})
        return
    for name in done.copied if dry_run else ():
        typer.echo(name)
    for stage in done.replaced:
        typer.echo(f"{stage} {'would be' if dry_run else 'was'} replaced")
    typer.echo(
        f"{what}: {'would copy' if dry_run else 'copied'} {done.objects} objects ({readable(done.bytes)}) "
        f"and {done.references} references, {done.skipped} were there already"
    )
