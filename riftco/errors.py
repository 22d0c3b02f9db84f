"""The errors a user of the package can meet, beside `artifacts.ArtifactError`."""

from typing import Any


class InputError(ValueError):
    """Bad user input: the message names the file, the line and the remedy. The command line exits with 2."""


class TokenizerError(ValueError):
    """Bytes the vocabulary lacks, ids outside it, or a tokenizer state that contradicts itself."""


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and this machine does not have it."""


class RankError(RuntimeError):
    """One of the processes that share a training run ended before its time, and so the run did."""


class NonFiniteError(ValueError):
    """A training step whose loss or gradient is not finite; nothing was updated.

    `facts` is plain JSON for whoever asks why: the step, the largest weights and gradients, the batch.
    """

    def __init__(self, message: str, facts: dict[str, Any]) -> None:
        super().__init__(message)
        self.facts = facts


class TrainingStopped(RuntimeError):
    """A training that was asked to end between two steps, and has kept its state; nothing went wrong."""
