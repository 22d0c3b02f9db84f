"""The one family of errors that reading, checking and storing artifacts can raise."""


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


class StoreError(ArtifactError):
    """An object, reference or folder of the store that is missing, damaged or cannot be written."""
