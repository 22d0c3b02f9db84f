"""The errors a user of the package can meet, beside `artifacts.ArtifactError`."""


class InputError(ValueError):
    """Bad user input: the message names the file, the line and the remedy. The command line exits with 2."""


class TokenizerError(ValueError):
    """Bytes the vocabulary lacks, ids outside it, or a tokenizer state that contradicts itself."""


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and this machine does not have it."""
