"""What is wrong with a file of another tool."""

from collections.abc import Iterator
from contextlib import contextmanager

from artifacts import ArtifactError


class InterchangeError(ArtifactError):
    """A file that is damaged, or is no model of ours in the format that was named."""


class UnsupportedHuggingFaceModelError(InterchangeError):
    """A directory of Hugging Face's with a model of another architecture."""


@contextmanager
def refused(what: object) -> Iterator[None]:
    """Whatever a file's content makes our checks raise leaves as an InterchangeError led by its name."""
    try:
        yield
    except ArtifactError as error:
        kind = type(error) if isinstance(error, InterchangeError) else InterchangeError
        raise kind(error.code, f"{what}: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InterchangeError("content", f"{what}: {error}") from error
