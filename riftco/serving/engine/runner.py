"""The forward of a plan: the model's weights, the pages of keys and values, and the draw of tokens."""

import warnings
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from artifacts import ModelBundle
from kernels import DecodeStep, DecodeWeights, greedy, sample
from riftco.backends import BackendName, torch_device
from riftco.serving.engine.request import Drawn, TokenLogprob
from riftco.serving.engine.scheduler import Plan, Work
from riftco.serving.engine.sequence import Sequence

Mode = Literal["deterministic", "fast"]
WeightKind = Literal["float32", "bfloat16", "int8", "nf4"]
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Token ids, positions, page tables and which rows need logits."""
Draw = Callable[[Tensor, list[Sequence]], list[int]]


def page_dtype(weights: WeightKind) -> torch.dtype:
    """Of keys and values: float32 beside float32 weights, else bfloat16, which takes half the memory."""
    return torch.float32 if weights == "float32" else torch.bfloat16


class ModelRunner:
    """A bundle's weights, copied into the layout and type that a step reads, and `page_count` zeroed pages.

    In `deterministic` mode a row's results have the same bits in whatever company it is computed. The native
    step promises that by itself; without it rows are computed one at a time.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        page_count: int,
        page_size: int,
        backend: BackendName = "cpu",
        weights: WeightKind = "float32",
        mode: Mode = "deterministic",
        threads: int | None = None,
    ) -> None:
        config, device = bundle.config, torch_device(backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mapped weights are read-only, and only read
            tensors = {name: torch.from_numpy(x).to(device) for name, x in bundle.tensors().items()}
        prepared = DecodeWeights.prepare(
            tensors,
            head_count=config.head_count,
            layer_norm_epsilon=config.layer_norm_epsilon,
            kind=weights,
        )
        self._device, self._threads, self._page_size = device, threads, page_size
        self._alone = mode == "deterministic" and not prepared.is_native
        shape = (page_count, config.head_count, page_size, config.model_width // config.head_count)
        self._keys = [_zeros(shape, page_dtype(weights), device) for _ in range(config.block_count)]
        self._values = [_zeros(shape, page_dtype(weights), device) for _ in range(config.block_count)]
        self._decode = DecodeStep(prepared, self._keys, self._values)
        self._table_width = -(-config.maximum_context // page_size)
        self._vocabulary_size, self._maximum_context = config.vocabulary_size, config.maximum_context

    def run(self, plan: Plan) -> list[Drawn]:
        """Compute a plan's tokens and draw one for each of `plan.sampling`, or say why not."""
        for source, target in plan.copies:
            for pages in (*self._keys, *self._values):
                pages[target] = pages[source]
        logits = self._logits(plan.work)
        return _draw(logits, plan.sampling) if len(logits) else []

    def _logits(self, work: Several[Work]) -> Tensor:
        """Logits `[samples, V]` after the last token of each work that samples."""
        token_ids, positions, table, needs = array("q"), array("q"), array("q"), bytearray()
        for one in work:
            sequence, first = one.sequence, one.sequence.start + one.begin
            token_ids.extend(sequence.tokens[first : first + one.count])
            positions.extend(range(one.begin, one.begin + one.count))
            unused = self._table_width - len(sequence.pages)
            table += array("q", sequence.pages + [0] * unused) * one.count
            needs += bytes(one.count - 1)
            needs.append(one.samples)
        rows = (
            torch.frombuffer(token_ids, dtype=torch.int64),
            torch.frombuffer(positions, dtype=torch.int64),
            torch.frombuffer(table, dtype=torch.int64).view(-1, self._table_width),
            torch.frombuffer(needs, dtype=torch.bool),
        )
        ids, at, pages, needed = (x.to(self._device) for x in rows)
        return self._step((ids, at, pages, needed))

    def _step(self, rows: Rows) -> Tensor:
        """The logits of those rows that need them."""
        if not self._alone:
            return self._decode(*rows, self._threads)
        return torch.cat([self._decode(*row, self._threads) for row in _apart(rows)])

    def is_batch_invariant(self) -> bool:
        """Whether rows give the same bits alone and together, in one chunk and in several: tried out on this
        machine with this model, on pages that nothing uses yet. True by construction where rows run alone."""
        count = min(8, self._maximum_context)  # more than a tile of rows
        token_ids = torch.arange(count, device=self._device) % self._vocabulary_size
        positions = torch.arange(count, device=self._device)
        table = torch.arange(-(-count // self._page_size), device=self._device).repeat(count, 1)
        needs = torch.ones(count, dtype=torch.bool, device=self._device)
        rows = token_ids, positions, table, needs
        together = self._step(rows)
        first, *_, last = _apart(rows) if count > 1 else (rows, rows)
        apart = torch.cat([self._step(first), self._step(last)])
        return torch.equal(together[[0, -1]], apart)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory until they are written: numpy asks the system for them, torch writes them."""
    bits = np.zeros(shape, np.int32 if dtype == torch.float32 else np.int16)
    return torch.from_numpy(bits).view(dtype).to(device)


def _apart(rows: Rows) -> Iterator[Rows]:
    """Each row by itself."""
    token_ids, positions, tables, needs = (x.split(1) for x in rows)
    return zip(token_ids, positions, tables, needs, strict=True)


def _draw(logits: Tensor, sequences: Several[Sequence]) -> list[Drawn]:
    """A token for each row of logits; a row's draw does not depend on the others.

    Nor does its failure: logits that are not finite, from a broken model or with enormous penalties, are the
    error of that sequence alone.
    """
    try:
        return _draw_all(logits, sequences)
    except ValueError as error:
        if len(sequences) == 1:
            return [Drawn(None, error=str(error))]
        rows = zip(logits.split(1), sequences, strict=True)
        return [one for row, sequence in rows for one in _draw(row, [sequence])]


def _draw_all(logits: Tensor, sequences: Several[Sequence]) -> list[Drawn]:
    if all(s.greedy and s.request.top_logprobs is None for s in sequences):
        return [Drawn(token_id) for token_id in greedy(logits).tolist()]
    kinds: dict[Draw, list[int]] = {}
    for row, sequence in enumerate(sequences):
        kinds.setdefault(_kind(sequence), []).append(row)
    drawn: dict[int, int] = {}
    for draw, rows in kinds.items():
        alike = logits if len(rows) == len(sequences) else logits[rows]
        drawn |= zip(rows, draw(alike, [sequences[row] for row in rows]), strict=True)
    return [
        Drawn(drawn[row], _logprob(drawn[row], logits[row], sequence.request.top_logprobs))
        for row, sequence in enumerate(sequences)
    ]


def _kind(sequence: Sequence) -> Draw:
    if sequence.greedy:
        return _greedy
    return _sampled_with_penalties if sequence.request.sampling.penalizes else _sampled


def _greedy(logits: Tensor, _: list[Sequence]) -> list[int]:
    return greedy(logits).tolist()


def _sampled(logits: Tensor, sequences: list[Sequence], **penalties: Tensor) -> list[int]:
    vocabulary = logits.shape[1]
    top_k = [s.request.sampling.top_k or vocabulary for s in sequences]
    ids, _ = sample(
        logits,
        uniforms=torch.tensor([s.uniform for s in sequences], dtype=torch.float64),
        top_k=torch.tensor(top_k),
        **_settings(sequences, "temperature", "top_p", "min_p"),
        **penalties,
    )
    return ids.tolist()


def _sampled_with_penalties(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    counts, prompt = (x.to(logits.device) for x in _earlier_tokens(sequences, logits.shape[1]))
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return _sampled(logits, sequences, counts=counts, prompt=prompt, **_settings(sequences, *names))


def _settings(sequences: list[Sequence], *names: str) -> dict[str, Tensor]:
    """Sampling settings, each float64 `[R]`."""
    rows = [s.request.sampling for s in sequences]
    return {n: torch.tensor([getattr(one, n) for one in rows], dtype=torch.float64) for n in names}


def _earlier_tokens(sequences: list[Sequence], vocabulary: int) -> tuple[Tensor, Tensor]:
    """How often each id was generated, int64 `[R, V]`, and which are in the prompt, bool `[R, V]`."""
    counts = torch.zeros(len(sequences), vocabulary, dtype=torch.int64)
    prompt = torch.zeros(len(sequences), vocabulary, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        generated = torch.tensor(sequence.tokens[sequence.prompt_tokens :], dtype=torch.int64)
        counts[row] = torch.bincount(generated, minlength=vocabulary)
        prompt[row, torch.tensor(sequence.request.prompt_ids)] = True
    return counts, prompt


def _logprob(token_id: int, logits: Tensor, top: int | None) -> TokenLogprob | None:
    """The token's and those of the `top` likeliest, ties by id; in float64, one row at a time."""
    if top is None:
        return None
    values = logits.cpu().double().numpy()  # not every device has float64
    below = values - values.max()
    logprobs = np.maximum(below - np.log(np.exp(below).sum()), np.finfo(np.float32).min)
    shown = logprobs.astype(np.float32).tolist()
    likeliest = np.argsort(-values, kind="stable")[:top].tolist()
    return TokenLogprob(token_id, shown[token_id], tuple((i, shown[i]) for i in likeliest))
