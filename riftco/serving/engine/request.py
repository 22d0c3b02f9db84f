"""What may be asked of the engine, and what it answers: plain values, checked once, without torch."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, get_args

Overflow = Literal["slide", "half", "stop"]
"""When the context is full: replay the newest whole context for each further token (the contract's), replay
its newest half once and go on, or finish."""

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

MOST_LOGPROBS = 20
_LEAST = sys.float_info.min  # what is below is no normal number, and no kernel's


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from logits; see `kernels.sampling.sample` for each setting.

    Temperature 0 is greedy. The random number of token i of choice c is a function of (seed, c, i) alone.
    TypeError and ValueError name the setting that is wrong.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require_real("temperature", self.temperature, "not be negative", lambda x: x >= 0)
        if self.top_k is not None:
            _require_integer("top_k", self.top_k, 1)
        _require_real("top_p", self.top_p, "be above 0 and at most 1", lambda x: _LEAST <= x <= 1)
        _require_real("min_p", self.min_p, "be from 0 to 1", lambda x: 0 <= x <= 1)
        _require_real("repetition_penalty", self.repetition_penalty, "be above 0", lambda x: x >= _LEAST)
        _require_real("presence_penalty", self.presence_penalty)
        _require_real("frequency_penalty", self.frequency_penalty)
        _require_integer("seed", self.seed, 0, 2**64 - 1)

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it, `choices` times. TypeError and ValueError name what is wrong."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 32
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: int = 1
    stop: tuple[str, ...] = ()
    """The text ends before the first of these to be completed."""
    overflow: Overflow = "slide"
    top_logprobs: int | None = None
    """None for no log-probabilities, n for those of each token and of the n likeliest."""
    seconds: float | None = None
    """Deadline, counted from submission."""
    salt: bytes = b""
    """Cached pages are shared only between requests of equal salts."""

    def __post_init__(self) -> None:
        _require_integer("max_new_tokens", self.max_new_tokens, 1)
        _require_integer("choices", self.choices, 1)
        if self.top_logprobs is not None:
            _require_integer("top_logprobs", self.top_logprobs, 0, MOST_LOGPROBS)
        if self.seconds is not None:
            _require_real("seconds", self.seconds, "be above 0", lambda x: x > 0)
        if not self.prompt_ids:
            raise ValueError("prompt must encode to at least one token")
        if {*map(type, self.prompt_ids)} != {int}:
            raise TypeError("prompt_ids must be integers")
        if isinstance(self.stop, str) or any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError("stop must hold non-empty strings")
        if self.overflow not in get_args(Overflow):
            raise ValueError(f"overflow must be one of {', '.join(get_args(Overflow))}")
        if not isinstance(self.salt, bytes):
            raise TypeError("salt must be bytes")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under softmax of its logits, and the likeliest ids with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn, and log-probabilities where its request asks for them; or why there is none."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice: of its prompt, of these found in the cache, and generated."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Event:
    """News of one choice. Texts concatenated are the whole text; exactly one event of a choice, its last, has
    `finish` and `usage`."""

    choice: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None


def _require_real(
    name: str, value: object, rule: str = "", holds: Callable[[float], bool] = lambda _: True
) -> None:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite")
    if not holds(number):
        raise ValueError(f"{name} must {rule}")


def _require_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not bool")
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an integer")
    if value < least:
        raise ValueError(f"{name} must be at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {_words(most)}")


def _words(most: int) -> str:
    return "2**64 - 1" if most == 2**64 - 1 else str(most)
