"""The one family of errors that reading, checking and storing artifacts can raise."""

from collections.abc import Iterator
from contextlib import contextmanager


class ArtifactError(ValueError):
    """An artifact that cannot be read, is not what it claims to be, or cannot be stored.

    `code` is a stable short word for programs; the message is for people and names thing, value and remedy.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BundleError(ArtifactError):
    """A `.rift` bundle that is damaged, not canonical or contradicts itself."""


class CheckpointError(ArtifactError):
    """A `.riftckpt` checkpoint that is damaged, not canonical or contradicts itself."""


class DatasetError(ArtifactError):
    """A prepared dataset that is damaged, incomplete or contradicts its manifest."""


class StoreError(ArtifactError):
    """An object, reference or folder of the store that is missing, damaged or cannot be written."""


@contextmanager
def refused_as(error_type: type[ArtifactError], what: str = "") -> Iterator[None]:
    """Let every ArtifactError leave as an `error_type` of the same code, its message led by `what`."""
    try:
        yield
    except ArtifactError as error:
        if type(error) is error_type and not what:
            raise
        message = f"{what}: {error}" if what else str(error)
        raise error_type(error.code, message) from error
