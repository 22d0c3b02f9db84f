"""The chat page: self-contained, and in a real browser (where one is installed) it behaves as promised."""

import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from tests.riftco.serving.models import bundle

PAGE = files("riftco.serving").joinpath("chat.html").read_text(encoding="utf-8")
CHROMIUM = shutil.which("chromium")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert not re.findall(r"https?:|\bsrc=|\bhref=|@import|url\(", PAGE)
    assert "innerHTML" not in PAGE
    assert 'role="log" aria-live="polite"' in PAGE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = ServingConfig(backend="cpu", maximum_new_tokens=6)
    with ModelService(bundle("bpe"), config) as service, background_server(service) as url:
        yield url


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    page = browser.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(url)
    yield page
    page.close()


def answer_with(page: Any, generated_text: str) -> None:
    page.route("**/v1/generate", lambda route: route.fulfill(json={"generated_text": generated_text}))


def sent(page: Any, action: Any) -> dict[str, Any]:
    with page.expect_request("**/v1/generate") as request:
        action()
    return json.loads(request.value.post_data)


def test_it_shows_what_is_served_and_lowers_the_slider(page: Any) -> None:
    page.locator("#connection[data-state=online]").wait_for()
    details = " ".join(page.inner_text("#details").split())
    assert details.startswith(
        "backend cpu cache paged, 16 per page stage pretraining context 16 vocabulary 290"
    )
    assert details.endswith(f"artifact {bundle('bpe').artifact_id[:10]}")
    assert page.get_attribute("#artifact", "title") == bundle("bpe").artifact_id
    assert (page.get_attribute("#tokens", "max"), page.input_value("#tokens")) == ("6", "6")
    assert page.inner_text("#tokens-value") == "6"
    assert "16 tokens" in page.inner_text("#notice")
    assert page.complaints == []


def test_enter_sends_one_independent_turn(page: Any) -> None:
    page.locator("#send:enabled").wait_for()
    page.fill("#message", "  first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second  ")
    body = sent(page, lambda: page.keyboard.press("Enter"))
    prompt = "### User:\nfirst\nsecond\n### Assistant:\n"
    assert body == {"prompt": prompt, "max_new_tokens": 6, "temperature": 0, "seed": 0}
    page.locator(".model:not(.waiting)").wait_for()
    page.fill("#seed", "7")
    page.fill("#message", "again")
    body = sent(page, lambda: page.click("#send"))
    assert (body["prompt"], body["seed"]) == ("### User:\nagain\n### Assistant:\n", 7)
    page.locator(".model:not(.waiting)").nth(1).wait_for()
    assert page.complaints == []


def test_model_output_is_text_and_may_be_empty(page: Any) -> None:
    page.locator("#send:enabled").wait_for()
    for text, shown in [
        (" <img src=x onerror=alert(1)> ", "<img src=x onerror=alert(1)>"),
        (" \n", "nothing"),
    ]:
        answer_with(page, text)
        page.fill("#message", "<b>hi</b>")
        page.keyboard.press("Enter")
        page.locator(".model:not(.waiting)", has_text=shown).wait_for()
    assert page.locator("#log img, #log b").count() == 0
    page.click("#clear")
    assert page.locator("#log .message").count() == 1
    assert "Say something" in page.inner_text("#log")


def test_nothing_is_sent_while_composing_blank_or_generating(page: Any) -> None:
    page.locator("#send:enabled").wait_for()
    waiting: list[Any] = []
    page.route("**/v1/generate", lambda route: waiting.append(route))
    page.fill("#message", "   ")
    page.keyboard.press("Enter")
    assert page.get_attribute("#message", "maxlength") == "4000"
    page.fill("#message", "half a word")
    composing = "{key: 'Enter', isComposing: true, bubbles: true, cancelable: true}"
    page.evaluate(
        f"document.getElementById('message').dispatchEvent(new KeyboardEvent('keydown', {composing}))"
    )
    assert page.locator(".user").count() == 0
    page.fill("#message", "one")
    page.keyboard.press("Enter")
    page.locator(".waiting").wait_for()
    assert page.is_disabled("#clear")
    page.fill("#message", "two")
    page.keyboard.press("Enter")
    assert page.locator(".user").count() == 1
    waiting[0].fulfill(status=400, json={"error": "Bad Request", "detail": "no such luck"})
    page.locator(".error", has_text="no such luck").wait_for()
    assert page.is_enabled("#clear")
    assert page.input_value("#message") == "two"


def test_a_server_that_is_away_is_shown_as_offline(browser: Any, url: str) -> None:
    page = browser.new_page()
    page.route("**/health", lambda route: route.abort())
    page.goto(url)
    page.locator("#connection[data-state=offline]").wait_for()
    assert page.inner_text("#connection").startswith("offline: ")
    assert page.is_disabled("#send")
    page.close()
