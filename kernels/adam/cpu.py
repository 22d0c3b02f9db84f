"""Adam's step by the compiled code.

A step leaves bounds of its new values behind. As long as they lie where they lay and torch's version counters
say that nobody has changed them, the next step reads only the gradients before it decides.
"""

from array import array
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kernels.adam.transaction import Bounds, Settings, run, versions
from kernels.native import Integer, Pointer, function

_measure = function("riftco_adam_measure", *[Pointer] * 3, Integer, Integer)
_update = function("riftco_adam_update", *[Pointer] * 3, Integer, Integer)


def step(
    first: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_pages: Sequence[Tensor],
    second_pages: Sequence[Tensor],
    page_counts: Sequence[int],
    settings: Settings,
) -> tuple[float, float]:
    """As `reference.step`, for tensors that lie dense in memory; gradients are made so."""
    written = [*parameters, *first_pages, *second_pages]
    if _update is None or first.device.type != "cpu" or not all(map(Tensor.is_contiguous, written)):
        return NotImplemented
    if not all(map(Tensor.is_contiguous, gradients)):
        gradients = [g.contiguous() for g in gradients]
    arrays = _Arrays(parameters, gradients, first_pages, second_pages, page_counts)
    last = _recall(written, versions(written), arrays.places)
    if last:
        arrays.known = last.bounds
    norm, clip, bounds = run(arrays, settings)
    torch.autograd.graph.increment_version(written)
    _remember(last.tensors if last else [*map(ref, written)], written, arrays.places, bounds)
    return norm, clip


class _Arrays:
    """`Arrays` on the CPU; the tensors have to outlive it."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        first_pages: Sequence[Tensor],
        second_pages: Sequence[Tensor],
        page_counts: Sequence[int],
    ) -> None:
        self.known: Bounds | None = None
        self._largest = array("I", (0, 0, 0))
        places, sizes = Tensor.data_ptr, Tensor.numel
        self._columns = [
            array("q", column)
            for column in (
                map(places, parameters),
                map(places, gradients),
                map(sizes, parameters),
                page_counts,
                map(places, first_pages),
                map(places, second_pages),
                map(sizes, first_pages),
            )
        ]
        self.places = [self._columns[i] for i in (0, 4, 5)]  # of what is written
        self._tensors = array("q", [len(parameters), *map(_at, self._columns)])
        self._threads = torch.get_num_threads()

    def measure(self) -> tuple[float, Bounds]:
        squares, known = array("d", [0.0]), self.known is not None
        assert _measure is not None
        _measure(_at(self._tensors), _at(squares), _at(self._largest), known, self._threads)
        return squares[0], self.known or Bounds.of_patterns(self._largest)

    def finite(self, settings: tuple[float, ...]) -> bool:
        self._call_update(settings, write=False)
        return max(pattern & 0x7FFFFFFF for pattern in self._largest) < 0x7F800000

    def apply(self, settings: tuple[float, ...]) -> None:
        self._call_update(settings, write=True)

    def _call_update(self, settings: tuple[float, ...], write: bool) -> None:
        numbers = array("d", settings)
        assert _update is not None
        _update(_at(self._tensors), _at(numbers), _at(self._largest), write, self._threads)


class _Remembered(NamedTuple):
    """The tensors that the last step wrote, as it left them."""

    tensors: list[ref[Tensor]]
    versions: list[int]
    places: list[array]
    bounds: Bounds


_remembered: _Remembered | None = None


def _remember(tensors: list[ref[Tensor]], written: list[Tensor], places: list[array], bounds: Bounds) -> None:
    global _remembered
    _remembered = _Remembered(tensors, versions(written), places, bounds) if bounds.finite else None


def _recall(written: list[Tensor], found: list[int], places: list[array]) -> _Remembered | None:
    """What the last step left, if it wrote these tensors and nobody has since."""
    last = _remembered
    if last is None or len(last.tensors) != len(written):
        return None
    same = all(map(is_, [known() for known in last.tensors], written))
    return last if same and last.versions == found and last.places == places else None


def _at(values: array) -> int:
    return values.buffer_info()[0]
