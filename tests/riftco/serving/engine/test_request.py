"""Requests are checked before anything is made of them, and the error names what is wrong."""

import math
from fractions import Fraction
from typing import Any

import pytest

from riftco.serving.engine.request import GenerationRequest, SamplingParams

HUGE = 10**400  # beyond every float

RIGHT = [
    *({"temperature": value} for value in (0, 0.0, 1, 1e308, Fraction(1, 3))),
    *({"top_k": value} for value in (None, 1, HUGE)),
    *({"top_p": value} for value in (1, 1e-300, 0.5)),
    *({"min_p": value} for value in (0, 1, 0.5)),
    *({"repetition_penalty": value} for value in (1e-9, 1, 2.5)),
    *({"presence_penalty": value, "frequency_penalty": -value} for value in (-2.0, 0, 2)),
    *({"seed": value} for value in (0, 2**64 - 1)),
]

REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

WRONG = [
    *(
        (name, value, TypeError, "must be a real number")
        for name in REALS
        for value in (True, "1", None, 1j, [])
    ),
    *(
        (name, value, ValueError, "must be finite")
        for name in REALS
        for value in (math.nan, math.inf, -math.inf, HUGE)
    ),
    ("temperature", -1e-9, ValueError, "must not be negative"),
    *(("top_k", value, TypeError, "must be an integer") for value in (True, 1.0, "1")),
    *(("top_k", value, ValueError, "must be at least 1") for value in (0, -1, -HUGE)),
    *(("top_p", value, ValueError, "must be above 0 and at most 1") for value in (0, -0.5, 1.0000001)),
    *(("min_p", value, ValueError, "must be from 0 to 1") for value in (-0.1, 1.1)),
    *(("repetition_penalty", value, ValueError, "must be above 0") for value in (0, -1)),
    *(("seed", value, TypeError, "must be an integer") for value in (False, 0.0, None)),
    *(("seed", value, ValueError, "must be at least 0") for value in (-1, -HUGE)),
    *(("seed", value, ValueError, r"must be at most 2\*\*64 - 1") for value in (2**64, HUGE)),
]

WRONG_REQUESTS = [
    *(
        (name, value, TypeError, "must be an integer")
        for name in ("max_new_tokens", "choices")
        for value in (True, 1.0)
    ),
    *(
        (name, value, ValueError, "must be at least 1")
        for name in ("max_new_tokens", "choices")
        for value in (0, -5)
    ),
    *(("top_logprobs", value, TypeError, "must be an integer") for value in (True, 0.0)),
    ("top_logprobs", -1, ValueError, "must be at least 0"),
    ("top_logprobs", 21, ValueError, "must be at most 20"),
    *(("seconds", value, ValueError, "must be above 0") for value in (0, -1.5)),
    ("seconds", math.nan, ValueError, "must be finite"),
    ("seconds", "1", TypeError, "must be a real number"),
    ("prompt_ids", (), ValueError, "at least one token"),
    *(("prompt_ids", (1, value), TypeError, "must be integers") for value in (1.5, "a", None, True)),
    *(
        ("stop", value, ValueError, "non-empty strings")
        for value in ("ab", ("",), ("a", ""), (b"a",), (None,))
    ),
    ("overflow", "wrap", ValueError, "must be one of slide, half, stop"),
    ("salt", "text", TypeError, "must be bytes"),
]


@pytest.mark.parametrize("settings", RIGHT, ids=str)
def test_settings_in_range_are_taken(settings: dict[str, Any]) -> None:
    SamplingParams(**settings)


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_settings_out_of_range_are_refused_by_name(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"{name} {message}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG_REQUESTS)
def test_requests_out_of_range_are_refused_by_name(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    field = "prompt" if name == "prompt_ids" else name
    with pytest.raises(error, match=f"{field}.* {message}"):
        GenerationRequest(**{"prompt_ids": (1,), name: value})


@pytest.mark.parametrize(
    ("settings", "penalizes"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_only_penalties_penalize(settings: dict[str, Any], penalizes: bool) -> None:
    assert SamplingParams(**settings).penalizes == penalizes
