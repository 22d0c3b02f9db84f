"""A run of Weights & Biases. The library's own variables say where: WANDB_MODE, WANDB_PROJECT and so on."""

import html
import os
from collections.abc import Sequence
from pathlib import Path

import wandb

from riftco.training.tracking.services import Record, Settings


class WandbRun:
    """One new run in the project `riftco`, or the one that WANDB_PROJECT names."""

    def __init__(self, run: str, folder: Path, settings: Settings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "riftco"),
            name=run,
            dir=str(folder),
            config=dict(settings),
            reinit="create_new",  # several runs may be open in one process
            settings=wandb.Settings(console="off"),  # our progress bar is not for its log
        )

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            values = dict(record.numbers)
            if record.text is not None:
                values["sample"] = wandb.Html(f"<pre>{html.escape(record.text)}</pre>", inject=False)
            self._run.log(values, step=record.step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
