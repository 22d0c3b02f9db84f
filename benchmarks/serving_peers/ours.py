"""riftco: the engine as `riftco serve` runs it, without HTTP, which no peer has here either."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any

from artifacts import ModelBundle
from benchmarks.serving_peers.work import Generate
from riftco.config import ServingConfig
from riftco.serving import ModelService
from riftco.serving.engine import Event, GenerationRequest


def load(folder: Path, variant: str, threads: int) -> Generate:
    """`variant`: mode and kind of weights, such as `fast bfloat16`."""
    mode, weights = variant.split()
    settings: Any = {"mode": mode, "weights": weights, "threads": threads}
    service = ModelService(ModelBundle.load(folder / "model.rift"), ServingConfig(backend="cpu", **settings))

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        for number, prompt in enumerate(prompts):
            request = GenerationRequest(tuple(prompt), max_new_tokens=new)
            service.engine.submit(request, lambda event, number=number: events.put((number, event)))
        ids: list[list[int]] = [[] for _ in prompts]
        remaining = len(prompts)
        while remaining:
            number, event = events.get()
            ids[number] += event.token_ids
            remaining -= event.finish is not None
        return ids

    return generate
