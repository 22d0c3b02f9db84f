"""What differs between two bundles: config, tokenizer and metadata by field, tensors by their norms."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.bundle import ModelBundle
from artifacts.lineage import Change, changes


@dataclass(frozen=True)
class TensorDifference:
    """How far one tensor of two bundles is apart."""

    name: str
    norm: float
    """Euclidean norm of the difference, in float64; infinite if one has no tensor of this name and shape."""
    relative: float
    """The same divided by the norm in the first bundle; 0 if both are, infinite if only that is."""
    largest: float
    """The largest absolute difference of one element."""


@dataclass(frozen=True)
class BundleDifference:
    """Everything in which a second bundle differs from a first."""

    fields: list[Change]
    """Places such as `config.model_width` or `metadata.training.steps`, with both values."""
    tensors: list[TensorDifference]
    """One for each tensor that differs, in the order of the bundles."""
    tensor_count: int
    """How many tensors there are in either."""


def bundle_difference(first: ModelBundle, second: ModelBundle) -> BundleDifference:
    """Compare two bundles, a tensor at a time."""
    before, after = first.tensors(), second.tensors()
    names = [*before, *(name for name in after if name not in before)]
    compared = [_tensor_difference(name, before.get(name), after.get(name)) for name in names]
    return BundleDifference(
        fields=changes(_fields(first), _fields(second)),
        tensors=[difference for difference in compared if difference.norm > 0],
        tensor_count=len(names),
    )


def _fields(bundle: ModelBundle) -> dict[str, Any]:
    tokenizer = bundle.tokenizer.to_json()
    return {
        "stage": bundle.stage,
        "parent_artifact_id": bundle.parent_artifact_id,
        "config": bundle.config.to_json(),
        "tokenizer": tokenizer | {"vocabulary_size": bundle.tokenizer.vocabulary_size},
        "metadata": bundle.metadata,
    }


def _tensor_difference(name: str, before: Any, after: Any) -> TensorDifference:
    if before is None or after is None or before.shape != after.shape:
        return TensorDifference(name, np.inf, np.inf, np.inf)
    difference = after.astype(np.float64) - before
    norm, whole = float(np.linalg.norm(difference)), float(np.linalg.norm(before.astype(np.float64)))
    relative = 0.0 if norm == 0 else norm / whole if whole else np.inf
    return TensorDifference(name, norm, relative, float(np.abs(difference).max(initial=0)))
