"""What the commands of `riftco` share: how errors end, and how a model is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from artifacts import ModelBundle, Store
from riftco.errors import BackendUnavailableError


@contextmanager
def user_errors() -> Iterator[None]:
    """What the user can mend ends in one line on standard error and exit code 2, Ctrl-C in code 130.

    ValueError and OSError are for users here, as everywhere in the project; programmers' errors are others.
    """
    try:
        yield
    except (ValueError, BackendUnavailableError) as error:
        typer.echo(f"riftco: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        typer.echo(f"riftco: {what}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("riftco: interrupted; the same command goes on from what is finished", err=True)
        raise typer.Exit(130) from None


def open_bundle(name: str) -> ModelBundle:
    """The bundle of a file, or of a name in the store; StoreError or BundleError otherwise."""
    if name.endswith(".rift") or Path(name).is_file():
        return ModelBundle.load(name)
    store = Store.open()
    return store.load_bundle(store.resolve(name))
