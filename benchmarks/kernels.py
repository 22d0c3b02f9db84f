"""Every operation of `kernels` on this CPU beside its peers, in one interleaved run.

    python benchmarks/kernels.py [--quick] [--json FILE]

One thread, processor time, the best of alternating rounds; each row says what the machine's limit is where
one is known. The targets are those that the operations were built for.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # the project, wherever this is run from

from benchmarks.harness import main
from benchmarks.kernel_rows import attention, decode, pointwise, weights


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """The rows of all operations."""
    for part in (attention, pointwise, weights, decode):
        yield from part.rows(quick)


if __name__ == "__main__":
    main(__doc__, rows)
