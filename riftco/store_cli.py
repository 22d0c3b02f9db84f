"""`riftco store`: look at the store, check it, name things in it, and move them in and out."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from artifacts import (
    ArtifactError,
    ModelBundle,
    Ref,
    Store,
    StoreError,
    Tag,
    TrainingCheckpoint,
)
from artifacts.canonical_json import parse_json
from artifacts.fsck import check_store
from artifacts.garbage import LONGEST_KEEPING, collect
from artifacts.lineage import Lineage
from artifacts.selection import is_readable
from riftco.commands import DryRun, Json, print_json, print_table, readable, show_work, user_errors
from riftco.errors import InputError
from riftco.transfer_cli import export_archive, import_archive, pull_from, push_to

store_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look at the store, check it, tag results, free space, and move results in and out. "
    "The store is the folder in $RIFTCO_STORE, else `store` in $RIFTCO_HOME, else `.riftco/store`.",
)

_LONGEST_SHOWN = 4096  # bytes
Name = Annotated[str, typer.Argument(help="A tag, run/stage, artifact id or digest.", metavar="NAME")]

store_app.command("export")(export_archive)
store_app.command("import")(import_archive)
store_app.command("push")(push_to)
store_app.command("pull")(pull_from)


@store_app.command("ls")
def list_store(as_json: Json = False) -> None:
    """List tags and runs, and how much the store holds; exit code 2 if some of these cannot be read."""
    with user_errors():
        store = Store.open(create=False)
        sizes = [store.objects.size(digest) for digest in store.digests()]
        runs = {run: store.run_stages(run) for run in store.runs()}
        found = {name: store.read_reference(name) for name in store.spoken_names()}
        damaged = [name for name, data in found.items() if data is not None and not is_readable(name, data)]
        if as_json:
            print_json(
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
                    "damaged": damaged,
                }
            )
        else:
            print_table([("name", "kind", "object"), *_names(store)])
            typer.echo(f"{len(sizes)} objects, {readable(sum(sizes))}, in {store.root}")
        if damaged:
            raise StoreError("damaged-reference", f"damaged: {', '.join(damaged)}; see `riftco store fsck`")


def _names(store: Store) -> Iterator[tuple[str, str, str]]:
    for name, ref in store.tags().items():
        yield name, f"tag of a {ref.kind}", ref.digest[:12]
    for run in store.runs():
        for stage, made in store.run_stages(run).items():
            for result, ref in made.record.results.items():
                yield f"{run}/{stage}/{result}", ref.kind, ref.digest[:12]


@store_app.command("show")
def show_object(name: Name, as_json: Json = False) -> None:
    """Show what an object is, where it lies, what it is called and which step made it."""
    with user_errors():
        store = Store.open(create=False)
        show_stored(store, store.resolve(name), as_json=as_json)


def show_stored(store: Store, ref: Ref, *, as_json: bool = False) -> None:
    """Print what is known of an object; StoreError, code "missing", if it is not there."""
    lineage = Lineage(store)
    facts = {
        **_ref_json(ref),
        "bytes": store.path(ref).stat().st_size,
        "path": str(store.path(ref)),
        "artifact_ids": [found for found, other in store.artifacts().items() if other == ref],
        "tags": [tag for tag, other in store.tags().items() if other == ref],
        "made_by": [
            {"step": made.step, "key": key, "seconds": made.seconds, "named": lineage.names.get(key, [])}
            for key, made in lineage.origin(ref).makers.items()
        ],
    }
    content = small_json(store, ref)
    if content is not None:
        facts["content"] = content
    if as_json:
        print_json(facts)
        return
    for fact, value in facts.items():
        if fact not in ("made_by", "content"):
            typer.echo(f"{fact:13} {', '.join(value) if isinstance(value, list) else value}")
    for made in facts["made_by"]:
        names = ", ".join(made["named"]) or "unnamed"
        typer.echo(f"made_by       {made['step']} in {made['seconds']} s, {names}")
    if content is not None:
        print_json(content)


def small_json(store: Store, ref: Ref) -> dict[str, Any] | None:
    """The content of a result that is a JSON object of at most 4 KiB; None for any other or a damaged one."""
    try:
        small = store.objects.size(ref.digest) <= _LONGEST_SHOWN
        content = parse_json(store.read_bytes(ref), what=ref.digest) if small else None
    except ArtifactError:
        return None
    return content if isinstance(content, dict) else None


@store_app.command("verify")
def verify_objects(
    names: Annotated[list[str], typer.Argument(help="Runs or objects to check.", metavar="NAME...")],
    as_json: Json = False,
) -> None:
    """Hash the objects of runs, stages, tags or ids; read bundles and checkpoints.

    All names are checked; exit code 2 if anything is wrong.
    """
    with user_errors():
        verify_names(names, as_json=as_json)


def verify_names(names: list[str], *, files: bool = False, as_json: bool = False) -> None:
    """Check objects of the store, and with `files` bundles and checkpoints in files; say what came of each.

    Raises typer.Exit, code 2, if anything is wrong.
    """
    said: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            if files and Path(name).is_file():
                said[name] = {"intact": 1, **verify_file(name)}
            else:
                said[name] = {"intact": verify_name(Store.open(create=False), name)}
        except (ArtifactError, OSError) as error:
            said[name] = {"error": getattr(error, "code", "file"), "message": str(error)}
    if as_json:
        print_json(said)
    for name, facts in () if as_json else said.items():
        if "error" in facts:
            typer.echo(f"riftco: {name}: {facts['message'].removeprefix(f'{name}: ')}", err=True)
        elif "artifact_id" in facts:
            typer.echo(f"{name}: intact, artifact {facts['artifact_id']}")
        elif "checkpoint_id" in facts:
            typer.echo(f"{name}: intact, checkpoint {facts['checkpoint_id']}")
        else:
            typer.echo(f"{name}: {facts['intact']} intact")
    if any("error" in facts for facts in said.values()):
        raise typer.Exit(2)


def verify_file(path: str) -> dict[str, str]:
    """The id of the bundle or checkpoint in a file. Raises ArtifactError unless it is intact."""
    if TrainingCheckpoint.is_at(path):
        return {"checkpoint_id": TrainingCheckpoint.load(path).checkpoint_id}
    return {"artifact_id": ModelBundle.load(path).artifact_id}


def verify_name(store: Store, name: str) -> int:
    """Check all objects that a name means; how many there were. Raises ArtifactError otherwise."""
    loaders = {"bundle": store.load_bundle, "checkpoint": store.load_checkpoint}
    refs = store.objects_of(name)
    for ref in refs:
        loaders.get(ref.kind, store.check)(ref)
    return len(refs)


@store_app.command()
def fsck(
    full: Annotated[bool, typer.Option("--full", help="Also hash every object.")] = False,
    as_json: Json = False,
) -> None:
    """Check the whole store: references readable, objects there, and with --full what they are called.

    Changes nothing. Exit code 2 if something is wrong; running a step again replaces what is damaged.
    """
    with user_errors(), show_work("fsck", size=True) as progress:
        store = Store.open(create=False)
        checked = check_store(store, full=full, progress=progress)
        if as_json:
            print_json(asdict(checked))
        else:
            for problem in checked.problems:
                typer.echo(f"{problem.code}: {problem.where}: {problem.message}")
            state = f"{len(checked.problems)} problems" if checked.problems else "clean"
            depth = "hashed" if full else "not hashed, --full does that"
            typer.echo(
                f"{store.root}: {state}; {checked.references} references, {checked.objects} objects, "
                f"{readable(checked.size)} ({depth})"
            )
        if checked.problems:
            raise typer.Exit(2)


@store_app.command()
def gc(
    unnamed: Annotated[
        bool,
        typer.Option("--unnamed", help="Also forget steps that no run and no tag reaches, if a day old."),
    ] = False,
    keep_days: Annotated[
        int,
        typer.Option(
            min=0,
            max=LONGEST_KEEPING,
            help="Days that the quarantine keeps objects; with 0, if nobody writes to the store, those moved "
            "there now go for good, and --unnamed forgets young steps too.",
        ),
    ] = 7,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Free space: move what no reference reaches into quarantine, and delete what was put there long ago.

    Every finished step is a reference, so that it need not run again. To free the space of old runs: `riftco
    store forget RUN`, then `riftco store gc --unnamed`; what was made within a day is spared, for a run at
    work names its results at their end. Until the quarantine is purged, nothing is lost: what is named again,
    by a tag of its digest or by references that have come back, returns from there.
    """
    with user_errors(), show_work("gc") as progress:
        store = Store.open(create=False)
        done = collect(store, unnamed=unnamed, keep_days=keep_days, dry_run=dry_run, progress=progress)
        if as_json:
            print_json(asdict(done) | {"dry_run": dry_run})
            return
        for line in [*done.references, *done.objects, *done.returned] if dry_run else []:
            typer.echo(line)
        counts = [
            f"{len(done.references)} references forgotten",
            *([f"{len(done.spared)} unnamed references younger than a day kept"] if done.spared else []),
            f"{len(done.objects)} objects ({readable(done.size)}) moved into quarantine",
            *([f"{len(done.returned)} objects brought back from there"] if done.returned else []),
            f"{len(done.temporary)} temporary files deleted",
            f"{len(done.purged)} days of quarantine deleted",
            f"{len(done.abandoned)} unfinished trainings given up",
        ]
        typer.echo(f"{'to do' if dry_run else 'done'}: {', '.join(counts)}")


@store_app.command()
def forget(
    run: Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")], dry_run: DryRun = False
) -> None:
    """Remove the names of a run. Its results stay until `riftco store gc --unnamed`."""
    with user_errors():
        store = Store.open(create=False)
        stages = store.references.names(f"runs/{run.removeprefix('runs/')}")
        if run.removeprefix("runs/") not in store.runs():
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
    force: Annotated[bool, typer.Option("--force", help="Replace a tag that cannot be read.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Give a result a name that stays when runs move on: `riftco store tag best demo/post-train`.

    A tag moves by compare-and-swap: of several who move it at once, one succeeds and the others are told.
    """
    with user_errors():
        _check_tag_arguments(tag, name, remove, expect)
        store = Store.open(create=False)
        if tag is None or (name is None and not remove):
            _show_tags(store, tag, as_json)
            return
        if name is not None:
            _refuse_name_of_a_run(store, tag)
        ref = store.resolve(name) if name is not None else None
        before = _standing_tag(store, tag, force)
        current = before.ref if before else None
        if remove and current is None:
            raise _unknown_tag(store, tag)
        old, new = (other.digest if other else None for other in (current, ref))
        if expect is not None and old != (None if expect == "none" else store.resolve(expect).digest):
            raise StoreError("tag-moved", f"tag {tag} means {old or 'nothing'} now")
        if not dry_run:
            store.set_tag(tag, ref, after=before, force=force)
        if as_json:
            print_json({"tag": tag, "before": old, "after": new, "dry_run": dry_run})
        else:
            moved = f"{tag}: {old[:12] if old else 'nothing'} -> {new[:12] if new else 'nothing'}"
            typer.echo(f"{moved}{' (dry run)' if dry_run else ''}")


def _check_tag_arguments(tag: str | None, name: str | None, remove: bool, expect: str | None) -> None:
    if remove and tag is None:
        raise InputError("--remove needs the name of a tag: riftco store tag TAG --remove")
    if remove and name is not None:
        raise InputError(f"--remove lets tag {tag} mean nothing, not {name}: give one of both")
    if expect is not None and name is None and not remove:
        raise InputError("--expect is for moving a tag: say what it is to mean, or --remove")
    if expect == "":
        raise InputError("--expect '' names nothing: give what the tag means now, or 'none' for a new tag")


def _refuse_name_of_a_run(store: Store, tag: str) -> None:
    if tag in store.runs():
        raise InputError(f"a run is called {tag}, and the tag would hide it; give the tag another name")


def _standing_tag(store: Store, tag: str, force: bool) -> Tag | None:
    try:
        return store.tag(tag)
    except StoreError as error:
        if force and error.code == "damaged-reference":
            return None
        raise


def _unknown_tag(store: Store, tag: str) -> InputError:
    return InputError(f"no tag is called {tag!r}; the tags are {', '.join(store.tags()) or 'none'}")


def _show_tags(store: Store, tag: str | None, as_json: bool) -> None:
    if tag is None:
        shown = store.tags()
    else:
        found = store.tag(tag)
        if found is None or found.ref is None:
            raise _unknown_tag(store, tag)
        shown = {tag: found.ref}
    if as_json:
        print_json({name: _ref_json(ref) for name, ref in shown.items()})
        return
    for name, ref in shown.items():
        typer.echo(f"{name} {ref.digest} {ref.kind}")


@store_app.command("put")
def put_file(
    path: Annotated[Path, typer.Argument(help="The file to store.", metavar="FILE")],
    kind: Annotated[
        str | None, typer.Option(help="A short word for what it is; not for artifacts. [default: file]")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag it too, or the next gc takes it.")] = None,
) -> None:
    """Store a copy of a file and print its digest; a `.rift` or `.riftckpt` file becomes an artifact."""
    with user_errors():
        if kind is not None and path.suffix in (".rift", ".riftckpt"):
            raise InputError(f"{path} is stored as the artifact it is, not as a {kind}: leave --kind out")
        ref = _put(Store.open(), path, kind or "file", tag)
        typer.echo(ref.digest)


def _put(store: Store, path: Path, kind: str, tag: str | None) -> Ref:
    if tag:
        _refuse_name_of_a_run(store, tag)
    before = store.tag(tag) if tag else None  # a damaged one is told before anything is stored
    if path.suffix == ".rift":
        ref = store.put_bundle(ModelBundle.load(path))
    elif path.suffix == ".riftckpt":
        ref = store.put_checkpoint(TrainingCheckpoint.load(path))
    else:
        ref = store.put_file(kind, path)
    if tag:
        store.set_tag(tag, ref, after=before)
    return ref


@store_app.command("get")
def get_object(
    name: Name,
    output: Annotated[
        Path, typer.Argument(help="The file to write; - is standard output.", metavar="FILE", allow_dash=True)
    ],
) -> None:
    """Write a checked copy of an object to a file or, with -, to standard output."""
    with user_errors():
        store = Store.open(create=False)
        ref = store.resolve(name)
        if str(output) == "-":
            with store.stream(ref) as stream:
                shutil.copyfileobj(stream, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        try:
            typer.echo(store.get(ref, output))
        except FileExistsError as error:
            raise InputError(f"{error}; `riftco store get {name} -` writes to standard output") from None


def _ref_json(ref: Ref) -> dict[str, Any]:
    return {"kind": ref.kind, "digest": ref.digest}
