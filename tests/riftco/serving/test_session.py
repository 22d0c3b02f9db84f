"""Decode sessions: equal to a full forward in every chunking, and unchanged by whatever goes wrong."""

import base64
import copy
import math

import numpy as np
import pytest
import torch

from artifacts import ModelConfig
from riftco.model import DecoderOnlyTransformer
from riftco.serving import DecodeSession, PagedKvCachePool
from tests.riftco.serving.models import BUNDLES, last_logits, runtime, tiny_config, tiny_model, token_ids
from tests.support import fixture

KINDS = ("paged", "contiguous")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUNDLES)
def test_recorded_logits(name: str, kind: str) -> None:
    model = runtime(name).model
    for prompt in fixture(f"{name}.reference.json")["prompts"]:
        data = base64.b64decode(prompt["logits_f32le_base64"])
        recorded = torch.from_numpy(np.frombuffer(data, "<f4").reshape(prompt["logits_shape"]).copy())
        ids = prompt["logits_token_ids"]
        with torch.no_grad(), DecodeSession(model, kind, 5) as session:
            torch.testing.assert_close(model(ids)[0], recorded, rtol=0, atol=1e-4)
            stepped = torch.stack([session.step(token) for token in ids])
            torch.testing.assert_close(stepped, recorded, rtol=0, atol=1e-4)
            session.reset()
            torch.testing.assert_close(session.extend(ids), recorded[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_any_chunking_equals_the_full_forward_even_on_poisoned_pages(length: int, kind: str) -> None:
    model, ids = tiny_model(), token_ids(length)
    expected = last_logits(model, ids)
    for chunk in (1, 2, 7, 16, length):
        with DecodeSession(model, kind) as session:
            pages = session._request_cache._pages
            for tensor in (*pages.keys, *pages.values):
                tensor.fill_(math.nan)
            for start in range(0, length, chunk):
                logits = session.extend(ids[start : start + chunk])
            assert session.size == length
        assert logits.dtype == torch.float32
        assert not logits.requires_grad
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "kind", "block_size"),
    [(" PAGED ", "paged", 16), (1, "paged", 16), ("Contiguous", "contiguous", 40), (0, "contiguous", 40)],
)
def test_the_cache_is_named_by_text_or_code(given: str | int, kind: str, block_size: int) -> None:
    with DecodeSession(tiny_model(), given) as session:
        assert session.cache == session.cache_kind == kind
        assert session.block_size == block_size
        assert session.capacity == 40


@pytest.mark.parametrize(
    ("cache", "block_size", "error"),
    [
        (True, 16, TypeError),
        ("sliding", 16, ValueError),
        (2, 16, ValueError),
        (None, 16, ValueError),
        ("paged", 0, ValueError),
        ("paged", True, TypeError),
        ("contiguous", 0, ValueError),
    ],
)
def test_wrong_options_are_refused(cache: object, block_size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        DecodeSession(tiny_model(), cache, block_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("token", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (19, ValueError),
        (2**32 - 1, ValueError),
        (2**32, OverflowError),
    ],
)
def test_a_wrong_token_changes_nothing(token: object, error: type[Exception], kind: str) -> None:
    model, ids = tiny_model(), token_ids(5)
    with DecodeSession(model, kind, 2) as session:
        session.extend(ids[:4])
        for tokens in ([token], [3, token]):
            with pytest.raises(error):
                session.extend(tokens)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least one token"):
            session.extend([])
        assert session.size == 4
        torch.testing.assert_close(session.step(ids[4]), last_logits(model, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_session_refuses_more_and_starts_again_after_reset(kind: str) -> None:
    model = tiny_model(context=6)
    with DecodeSession(model, kind, 4) as session:
        session.extend(token_ids(5))
        with pytest.raises(RuntimeError, match="capacity is exhausted: 5 of 6"):
            session.extend([1, 2])
        session.step(1)
        with pytest.raises(RuntimeError, match="capacity is exhausted: 6 of 6"):
            session.step(2)
        assert session.size == session.capacity == 6
        session.reset()
        assert session.size == 0
        torch.testing.assert_close(session.step(2), last_logits(model, [2]), rtol=0, atol=1e-5)


def test_a_closed_session_refuses_everything_but_closing() -> None:
    session = DecodeSession(tiny_model())
    session.step(1)
    session.close()
    session.close()
    assert session.closed
    for call in (lambda: session.step(1), lambda: session.extend([1]), session.reset):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_session_is_not_copied() -> None:
    with DecodeSession(tiny_model()) as session:
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied"):
                duplicate(session)


def test_a_changed_model_needs_a_reset_first() -> None:
    model, ids = tiny_model(), token_ids(3)
    with DecodeSession(model) as session:
        session.extend(ids[:2])
        with torch.no_grad():
            model.language_model_head.bias.add_(1)
        with pytest.raises(RuntimeError, match="parameters changed"):
            session.step(ids[2])
        session.reset()
        torch.testing.assert_close(session.extend(ids), last_logits(model, ids), rtol=0, atol=1e-5)


def test_a_layer_that_fails_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), token_ids(9)
    pool = PagedKvCachePool(model.config, block_size=4)
    with DecodeSession(model, pool=pool) as session:
        session.extend(ids[:4])
        with monkeypatch.context() as patch:
            patch.setattr(model.blocks[1], "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.extend(ids[4:])
        assert (session.size, pool.leased_block_count) == (4, 1)
        torch.testing.assert_close(session.extend(ids[4:]), last_logits(model, ids), rtol=0, atol=1e-5)


def test_sessions_on_one_pool_do_not_see_each_other() -> None:
    model = tiny_model()
    pool = PagedKvCachePool(model.config, block_size=3, block_count=20)
    first, second = token_ids(20), token_ids(20)[::-1]
    with DecodeSession(model, pool=pool) as left, DecodeSession(model, pool=pool) as right:
        for a, b in zip(first, second, strict=True):
            seen = left.step(a), right.step(b)
        assert left.block_size == 3
        torch.testing.assert_close(seen[0], last_logits(model, first), rtol=0, atol=1e-5)
        torch.testing.assert_close(seen[1], last_logits(model, second), rtol=0, atol=1e-5)
        left.reset()
        right.extend(token_ids(20))
        with pytest.raises(RuntimeError, match="pool is exhausted"):
            left.extend(token_ids(19) + token_ids(10))
        assert left.size == 0
    assert pool.free_block_count == 20


def test_a_pool_must_be_made_for_the_model() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="other dimensions"):
        DecodeSession(model, pool=PagedKvCachePool(tiny_config(layers=3)))
    with pytest.raises(ValueError, match="without a pool"):
        DecodeSession(model, "contiguous", pool=PagedKvCachePool(model.config))


def test_a_session_keeps_the_model_alive() -> None:
    session = DecodeSession(DecoderOnlyTransformer(ModelConfig(5, 4, 4, 2, 1, 4)))
    assert session.step(1).shape == (5,)
    session.close()
