"""What the benchmarks share: their options, their rows, and how rows are shown and kept.

A row says what was done, how fast we and a peer did it in the same run, and whether the ratio (above 1 means
that ours is better) reaches its target. A peer that is not there gives a row that says why.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(
    work: str, ours: float, unit: str, peer: str, peer_value: float | None, target: float | None, **more: Any
) -> Row:
    """A row; of seconds and bytes less is better, of anything else more. `more` is what else is known."""
    ratio = None
    if peer_value is not None:
        ratio = round(peer_value / ours if unit in ("s", "ms", "us", "MiB") else ours / peer_value, 3)
    met = None if target is None or ratio is None else ratio >= target
    numbers = {"ours": float(f"{ours:.4g}"), "unit": unit, "peer": peer}
    numbers["peer_value"] = None if peer_value is None else float(f"{peer_value:.4g}")
    return {"work": work, **numbers, "ratio": ratio, "target": target, "met": met, **more}


def main(description: str | None, rows: Callable[[bool], Iterable[Row]]) -> None:
    """Measure, print each row when it is there, and write all as JSON where asked."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less work, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    arguments = parser.parse_args()
    measured = []
    for found in rows(arguments.quick):
        measured.append(found)
        print(shown(found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def shown(found: Row) -> str:
    """One line for people."""
    if found["ratio"] is None:
        return (
            f"{found['work']}: {found['ours']:g} {found['unit']}; {found['peer']}: {found.get('reason', '-')}"
        )
    verdict = {True: "met", False: "NOT MET", None: ""}[found["met"]]
    target = f", target {found['target']:g} {verdict}" if found["target"] is not None else ""
    peer = f"{found['peer']} {found['peer_value']:g}"
    return f"{found['work']}: {found['ours']:g} {found['unit']}, {peer}: {found['ratio']:g}x{target}"
