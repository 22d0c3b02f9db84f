"""The chat page in a real browser, under its real policy: what each scenario promises, and no complaint.

Answers come from a scripted server, which can be as slow, hostile or broken as a test needs, and at the end
from the real one. With RIFTCO_ARTIFACTS set, a picture of each scenario is left in that folder.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from riftco.chat_template import PLAIN, ChatMessage
from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from tests.riftco.serving.http.scripted_server import (
    HEALTH,
    Refused,
    Script,
    answer,
    done,
    scripted_server,
    token,
)
from tests.riftco.serving.models import bundle

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ON_VIOLATION = "addEventListener('securitypolicyviolation', (e) => console.error(e.violatedDirective))"

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page of the browser and what it complained about."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self._complaints: list[str] = []
        self._requests: list[str] = []
        self.page = self._context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", lambda message: self._complaints.append(message.text))
        self.page.on("pageerror", lambda error: self._complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self._complaints.append(dialog.message) or dialog.dismiss())
        self.page.on("request", lambda request: self._requests.append(request.url))
        self.page.add_init_script(ON_VIOLATION)

    def close(self) -> None:
        self._context.close()

    @contextmanager
    def at(self, url: str) -> Iterator[Any]:
        """The page at this URL; `page.expected` are the complaints that a scenario provokes."""
        self._complaints.clear()
        self._requests.clear()
        self.page.expected = []
        self.page.goto(url)
        yield self.page
        assert [text for text in self._complaints if not any(e in text for e in self.page.expected)] == []
        assert [address for address in self._requests if not address.startswith((url, "data:"))] == []


@pytest.fixture(scope="module")
def usual(browser: Any) -> Iterator[Visit]:
    """The visit of every scenario that needs no browser settings of its own."""
    visit = Visit(browser)
    yield visit
    visit.close()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def scripted(browser: Any, usual: Visit, script: Script) -> Iterator[Open]:
    """Opens the page of the scripted server, whose port and so whose storage is new in each test."""

    @contextmanager
    def open_page(**options: Any) -> Iterator[Any]:
        visit = Visit(browser, **options) if options else usual
        with visit.at(url) as page:
            yield page
        if options:
            visit.close()

    with scripted_server(script) as url:
        yield open_page


@pytest.fixture
def page(scripted: Open) -> Iterator[Any]:
    """The page, online."""
    with scripted() as page:
        page.locator("#send:enabled").wait_for()
        yield page


@pytest.fixture
def snap(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Leave a picture of the page where CI wants it."""
    folder = os.environ.get("RIFTCO_ARTIFACTS")
    scenario = request.node.name.removeprefix("test_")

    def take(page: Any, moment: str = "end") -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder) / f"chat-{re.sub(r'[^a-z0-9]+', '-', scenario)}-{moment}.png")

    return take


def ask(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def ask_and_wait(page: Any, text: str) -> None:
    """Ask, and wait for the answer's end."""
    before = page.locator(".meta").count()
    ask(page, text)
    page.locator(".meta").nth(before).wait_for()


def shown_answer(page: Any) -> str:
    return page.locator(".model .text").last.inner_text()


def prompt_of(*texts: str) -> str:
    """What the server's own template makes of a conversation."""
    roles = ("user", "assistant")
    return PLAIN.render([ChatMessage(roles[i % 2], text) for i, text in enumerate(texts)])


def test_it_shows_what_is_served(page: Any, snap: Any) -> None:
    details = " ".join(page.inner_text("#details").split())
    assert page.inner_text("#connection") == "online"
    assert details == (
        "stage post-training backend cpu, float32, deterministic cache paged, 16 per page "
        "context 256 vocabulary 290 artifact 0123456789"
    )
    assert page.get_attribute("#artifact", "title") == HEALTH["artifact_id"]
    assert (page.get_attribute("#tokens", "max"), page.input_value("#tokens")) == ("128", "8")
    assert "Only the latest 256 tokens count" in page.inner_text("#notice")
    assert page.is_hidden("#key")
    assert page.is_hidden("#retry")
    snap(page)


def test_the_token_slider_is_lowered_to_what_the_server_allows(scripted: Open, script: Script) -> None:
    script.health["maximum_new_tokens"] = 6
    with scripted() as page:
        page.locator("#send:enabled").wait_for()
        assert (page.get_attribute("#tokens", "max"), page.input_value("#tokens")) == ("6", "6")
        assert page.inner_text("#tokens-value") == "6"


def test_offline_says_so_and_tries_again(page: Any, script: Script, snap: Any) -> None:
    page.expected = ["Failed to load resource"]
    page.route("**/health", lambda route: route.abort())
    page.reload()
    page.locator("#connection[data-state=offline]").wait_for()
    assert page.inner_text("#connection") == "offline: the server cannot be reached"
    assert page.is_disabled("#send")
    snap(page)
    page.fill("#message", "kept")
    page.press("#message", "Enter")
    assert page.locator(".message").count() == 0
    page.unroute("**/health")
    page.click("#retry")
    page.locator("#send:enabled").wait_for()
    assert page.inner_text("#connection") == "online"
    assert page.input_value("#message") == "kept"
    expect(page.locator("#message")).to_be_focused()


def test_a_stalled_engine_is_shown_also_in_the_middle_of_an_answer(
    scripted: Open, script: Script, snap: Any
) -> None:
    gate = Event()
    script.answer = [token(1, "one"), gate, token(2, " two"), *done(20, 2)]
    with scripted(locale="en") as page:
        page.expected = ["503"]
        page.clock.install()
        page.reload()
        page.locator("#send:enabled").wait_for()
        ask(page, "go")
        page.locator(".token").wait_for()
        script.health["status"] = "stalled"
        page.clock.fast_forward(6500)
        page.locator("#connection[data-state=stalled]").wait_for()
        assert page.inner_text("#connection") == "stalled: the engine has stopped"
        assert page.is_visible("#retry")
        snap(page)
        script.health["status"] = "ok"
        gate.set()
        page.locator("#connection[data-state=online]").wait_for()
        page.clock.run_for(100)  # frames
        page.locator(".meta").wait_for()
        assert shown_answer(page) == "one two"


def test_enter_sends_one_independent_turn(page: Any, script: Script, snap: Any) -> None:
    script.answer = answer("fine")
    page.fill("#message", "  first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second  ")
    page.keyboard.press("Enter")
    page.locator(".meta").wait_for()
    page.fill("#tokens", "12")
    page.fill("#temperature", "0.7")
    page.fill("#seed", "7")
    page.fill("#message", "again")
    page.click("#send")
    page.locator(".meta").nth(1).wait_for()
    common = {"stream": True, "logprobs": 5, "stop": list(PLAIN.stop)}
    first = {"prompt": prompt_of("first\nsecond"), "max_new_tokens": 8, "temperature": 0, "seed": 0}
    second = {"prompt": prompt_of("again"), "max_new_tokens": 12, "temperature": 0.7, "seed": 7}
    assert script.bodies == [common | first, common | second]
    assert page.locator(".user .text").all_inner_texts() == ["first\nsecond", "again"]
    snap(page)


def test_nothing_is_sent_while_composing_or_blank_or_with_a_wrong_seed(page: Any, script: Script) -> None:
    ask(page, "   ")
    assert page.get_attribute("#message", "maxlength") == "4000"
    page.fill("#message", "half a word")
    for how in ("isComposing: true", "keyCode: 229"):
        event = f"new KeyboardEvent('keydown', {{key: 'Enter', {how}, bubbles: true, cancelable: true}})"
        page.evaluate(f"document.getElementById('message').dispatchEvent({event})")
    page.fill("#seed", "-1")
    page.evaluate("document.getElementById('settings').open = false")
    page.press("#message", "Enter")
    expect(page.locator("#seed")).to_be_focused()  # the settings opened to show what is wrong
    assert script.bodies == []
    assert page.locator(".message").count() == 0


def test_the_message_box_grows_up_to_a_limit(page: Any) -> None:
    heights = []
    for lines in (1, 4, 80):
        page.fill("#message", "line\n" * (lines - 1) + "line")
        heights.append(page.locator("#message").bounding_box()["height"])
    assert heights[0] < heights[1] < heights[2] <= 11 * 16


def test_streaming_shows_what_has_come_so_far(page: Any, script: Script, snap: Any) -> None:
    bytes_of = '{"token_ids":[3],"text":" caf\u00e9"}'.encode()
    gate, end = Event(), Event()
    script.answer = [
        token(1, " One"),
        token(2, " two"),
        gate,
        b"data: " + bytes_of[:-3],  # in the middle of a character
        gate,
        bytes_of[-3:] + b"\r\n\r\n: a comment\n\n",
        end,
        *done(20, 3, cached=16),
    ]
    ask(page, "count")
    page.locator(".token").nth(1).wait_for()
    assert shown_answer(page) == "One two"
    assert page.is_visible("#stop")
    assert page.is_hidden("#send")
    assert page.is_disabled("#clear")
    assert page.get_attribute("#log", "aria-busy") == "true"
    snap(page, "partly")
    page.fill("#message", "typed ahead")
    page.press("#message", "Enter")
    gate.set()
    expect(page.locator(".model .text")).to_have_text("One two caf\u00e9")
    assert page.locator(".model .text").get_attribute("aria-live") == "off"
    assert page.text_content("#announcer") == ""  # only what is finished is announced
    end.set()
    page.locator(".meta").wait_for()
    assert page.text_content("#announcer") == "Model: One two caf\u00e9"
    assert re.fullmatch(
        r"3 tokens in [\d.]+ m?s · 16 of 20 prompt tokens from the cache", page.inner_text(".meta")
    )
    assert page.get_attribute("#log", "aria-busy") == "false"
    assert page.input_value("#message") == "typed ahead"
    assert len(script.bodies) == 1


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_cancels_the_request_and_keeps_what_came(
    page: Any, script: Script, snap: Any, how: str
) -> None:
    script.answer = [token(1, "Once upon"), Event()]
    ask(page, "a story")
    page.locator(".token").wait_for()
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    page.locator(".meta").wait_for()
    assert script.client_left.wait(5)
    assert shown_answer(page) == "Once upon"
    assert re.fullmatch(r"1 token in [\d.]+ m?s · stopped", page.inner_text(".meta"))
    assert page.is_enabled("#send")
    expect(page.locator("#message")).to_be_focused()
    snap(page)


def test_errors_show_their_detail_and_offer_another_try_where_it_may_help(
    page: Any, script: Script, snap: Any
) -> None:
    page.expected = ["Failed to load resource"]
    script.answer = Refused(400, "prompt byte 200 is not in the vocabulary")
    ask(page, "one")
    expect(page.locator(".error .text")).to_have_text("prompt byte 200 is not in the vocabulary")
    assert page.locator(".error button").count() == 0
    script.answer = Refused(429, "256 requests are waiting")
    ask(page, "two")
    expect(page.locator(".error .text").nth(1)).to_have_text("256 requests are waiting")
    snap(page)
    script.answer = answer("at last")
    page.click("text=Ask again")
    page.locator(".meta").wait_for()
    assert shown_answer(page) == "at last"
    assert page.locator(".error").count() == 1
    assert script.bodies[1] == script.bodies[2]
    assert page.locator(".user").count() == 2


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ([], "the connection ended before the answer did"),
        ([{"error": "Internal Server Error", "detail": "generation failed"}], "generation failed"),
    ],
)
def test_what_came_before_a_failure_stays(page: Any, script: Script, ending: list[Any], said: str) -> None:
    script.answer = [token(1, "half an"), *ending]
    ask(page, "go")
    expect(page.locator(".error .text")).to_have_text(said)
    assert shown_answer(page) == "half an"
    assert page.inner_text(".meta").endswith("incomplete")
    page.locator("#send:enabled").wait_for()


def test_clear_restores_the_greeting(page: Any, script: Script, snap: Any) -> None:
    greeting = page.inner_text("#log")
    assert greeting.startswith("Say something")
    script.answer = answer("an answer")
    page.check("#turns")
    ask_and_wait(page, "hello")
    assert page.locator(".greeting").count() == 0
    page.click("#clear")
    assert page.inner_text("#log") == greeting
    expect(page.locator("#message")).to_be_focused()
    ask_and_wait(page, "fresh")
    assert script.bodies[-1]["prompt"] == prompt_of("fresh")  # what was cleared is forgotten
    snap(page)


def test_multi_turn_sends_earlier_turns_only_when_asked_to(page: Any, script: Script, snap: Any) -> None:
    assert not page.is_checked("#turns")
    for question, said in [("one", "uno"), ("two", "due"), ("three", "tre")]:
        script.answer = answer(said)
        if question == "three":
            assert "earlier ones are not sent" in page.inner_text("#notice")
            page.check("#turns")
            assert "Earlier turns are sent too" in page.inner_text("#notice")
        ask_and_wait(page, question)
    snap(page)
    prompts = [body["prompt"] for body in script.bodies]
    assert prompts == [prompt_of("one"), prompt_of("two"), prompt_of("one", "uno", "two", "due", "three")]


def test_the_oldest_turns_are_left_out_when_the_context_is_full(
    scripted: Open, script: Script, snap: Any
) -> None:
    turns = ["first?", "yes, it is", "second?", "yes, it is", "third?"]
    latest = prompt_of(*turns[2:])
    script.health["maximum_context"] = len(prompt_of(*turns)) + 8 - 1  # with 8 new tokens, one too few
    with scripted() as page:
        page.locator("#send:enabled").wait_for()
        page.check("#turns")
        for count in (1, 3, 5):
            script.answer = answer("yes, it is", prompt=len(prompt_of(*turns[:count])))  # one token a byte
            ask_and_wait(page, turns[count - 1])
        assert [body["prompt"] for body in script.bodies] == [
            prompt_of("first?"),
            prompt_of("first?", "yes, it is", "second?"),
            latest,
        ]
        assert "The oldest turn no longer fits" in page.inner_text("#notice")
        assert page.locator(".horizon + .user .text").inner_text() == "second?"
        snap(page)


def test_larger_tokens_make_room_for_more_turns(scripted: Open, script: Script) -> None:
    script.health["maximum_context"] = 100
    with scripted() as page:
        page.locator("#send:enabled").wait_for()
        page.check("#turns")
        said = (
            "a rather long answer that takes more than a hundred bytes of the context, if each were a token"
        )
        script.answer = answer(said, prompt=len(prompt_of("first?")) // 4)
        ask_and_wait(page, "first?")
        ask_and_wait(page, "second?")
        assert script.bodies[-1]["prompt"] == prompt_of("first?", said, "second?")


def lantern() -> list[Any]:
    return [
        token(1, " On", (" At", 0.2), (" In", 0.1)),
        token(2, " the", (" a", 0.09), ("\n", 0.01), share=0.9),
        token(3, " shelf", (" table", 0.6), (" <b>bed</b>", 0.1), share=0.2),
        *done(20, 3),
    ]


def test_probabilities_appear_on_hover(page: Any, script: Script, snap: Any) -> None:
    script.answer = lantern()
    ask_and_wait(page, "where?")
    page.locator(".token", has_text="shelf").hover()
    card = page.locator("#card")
    expect(card).to_be_visible()
    rows = [row.split() for row in card.locator("tr").all_inner_texts()]
    assert rows == [["·table", "60.0", "%"], ["·shelf", "20.0", "%"], ["·<b>bed</b>", "10.0", "%"]]
    assert card.locator(".chosen code").inner_text() == "·shelf"
    snap(page)
    card.hover()  # one may go onto the card
    page.wait_for_timeout(250)
    expect(card).to_be_visible()
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.locator(".token", has_text="the").hover()
    assert "↵" in card.inner_text()
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()


def test_probabilities_appear_on_keyboard_focus(page: Any, script: Script, snap: Any) -> None:
    script.answer = lantern()
    ask_and_wait(page, "where?")
    page.press("#message", "Shift+Tab")
    card = page.locator("#card")
    expect(page.locator(".model .text")).to_be_focused()
    assert card.locator(".chosen code").inner_text() == "·On"
    for key, chosen in [("ArrowRight", "·the"), ("End", "·shelf"), ("ArrowRight", "·shelf"), ("Home", "·On")]:
        page.keyboard.press(key)
        assert card.locator(".chosen code").inner_text() == chosen
        assert page.locator(".token.current").count() == 1
    page.keyboard.press("End")
    assert page.text_content("#announcer") == "shelf: 20.0 %. Otherwise: table 60.0 %, <b>bed</b> 10.0 %"
    snap(page)
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.keyboard.press("ArrowLeft")  # first shows again where one was
    assert card.locator(".chosen code").inner_text() == "·shelf"
    page.keyboard.press("Tab")
    expect(card).to_be_hidden()


def test_characters_of_several_tokens_and_text_held_back_are_shown_once(page: Any, script: Script) -> None:
    late = "\ufffd"
    script.answer = [
        token(1, "Fire"),
        *(token(2 + i, late) | {"text": ""} for i in range(3)),
        token(5, late, share=0.25) | {"text": "\U0001f525"},
        token(6, "\n## no") | {"text": "\n"},
        token(7, " stop") | {"text": "## no stop"},
        token(8, "\n###") | {"text": ""},  # the beginning of a stop string, which never comes
        *done(20, 8, "stop"),
    ]
    ask_and_wait(page, "burn")
    assert shown_answer(page) == "Fire\U0001f525\n## no stop"
    pieces = page.locator(".token").all_inner_texts()
    assert pieces == ["Fire", "\U0001f525", "\n", "## no", " stop"]
    page.locator(".token").nth(1).hover()
    assert "written by 4 tokens" in page.inner_text("#card")
    assert "3.1 %" in page.inner_text("#card")  # 0.5 * 0.5 * 0.5 * 0.25


def focused(page: Any) -> tuple[str, bool]:
    """Which element has the focus, and whether one can see it."""
    id_, outline, ring = page.evaluate(
        """() => {
          const element = document.activeElement;
          const style = getComputedStyle(element);
          const box = getComputedStyle(element.closest(".box") ?? element);
          const visible = style.outlineStyle !== "none" && !style.outlineColor.endsWith(", 0)");
          const name = element.id || element.className || element.parentElement.id;
          return [name, visible, box.boxShadow !== "none"];
        }"""
    )
    return id_, outline or ring


def test_the_keyboard_alone_is_enough(page: Any, script: Script, snap: Any) -> None:
    script.answer = lantern()
    expect(page.locator("#message")).to_be_focused()  # from the start
    page.keyboard.type("where?")
    page.keyboard.press("Enter")
    page.locator(".meta").wait_for()
    page.focus("#theme")
    order = []
    while "turns" not in order:
        page.keyboard.press("Tab")
        name, visible = focused(page)
        assert visible, name
        order.append(name)
        if name == "text":
            snap(page, "answer")
    assert order == ["text", "message", "send", "settings", "tokens", "temperature", "seed", "turns"]
    page.keyboard.press("Space")
    assert page.is_checked("#turns")
    page.keyboard.press("Tab")
    assert focused(page) == ("clear", True)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_be_focused()
    assert page.locator(".message").count() == 0
    page.keyboard.press("Shift+Tab")  # no answer is left to stop at
    assert focused(page) == ("theme", True)
    page.keyboard.press("Enter")
    assert page.get_attribute("#theme", "aria-pressed") == "true"


def background(page: Any) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_follows_the_system_until_one_is_chosen(scripted: Open, snap: Any, system: str) -> None:
    other = {"light": "dark", "dark": "light"}[system]
    light, dark = "rgb(251, 250, 248)", "rgb(19, 22, 20)"
    colour = {"light": light, "dark": dark}
    with scripted(color_scheme=system) as page:
        page.locator("#send:enabled").wait_for()
        assert background(page) == colour[system]
        assert page.get_attribute("#theme", "aria-pressed") == str(system == "dark").lower()
        page.emulate_media(color_scheme=other)
        assert background(page) == colour[other]
        page.emulate_media(color_scheme=system)
        page.click("#theme")
        assert background(page) == colour[other]
        page.reload()
        assert background(page) == colour[other]
        assert page.get_attribute("#theme", "aria-pressed") == str(other == "dark").lower()
        page.locator("#send:enabled").wait_for()
        snap(page)


def test_a_browser_without_storage_is_no_obstacle(scripted: Open, script: Script) -> None:
    script.answer = answer("still here")
    with scripted(locale="en") as page:
        page.add_init_script(
            "for (const name of ['localStorage', 'sessionStorage'])"
            " Object.defineProperty(window, name, {get() { throw new Error('forbidden'); }})"
        )
        page.reload()
        page.locator("#send:enabled").wait_for()
        page.click("#theme")
        ask_and_wait(page, "hello")
        assert shown_answer(page) == "still here"


HOSTILE = (
    '<script>alert(1)</script><img src=x onerror="alert(2)">\x00\u202e\ufffd</p>{{x}}<style>*{display:none}'
)


def test_hostile_output_stays_text(page: Any, script: Script, snap: Any) -> None:
    script.answer = [token(1, HOSTILE, ("<img src=y onerror=alert(3)>", 0.3)), *done(20, 1)]
    ask_and_wait(page, "<b>hi</b><script>alert(0)</script>")
    assert page.locator(".model .text").text_content() == HOSTILE
    page.locator(".token").hover()
    assert "<img·src=y·onerror=alert(3)>" in page.inner_text("#card")
    assert page.locator("#log :is(img, b, script, style), #card img").count() == 0
    snap(page)


def test_the_browser_itself_refuses_to_parse_text_as_html(page: Any) -> None:
    page.expected = ["require-trusted-types-for", "TrustedHTML"]
    parse = "document.body.innerHTML = '<i></i>'"
    assert (
        page.evaluate(f"() => {{ try {{ {parse}; return 'parsed' }} catch {{ return 'refused' }} }}")
        == "refused"
    )
    assert page.locator("#log").count() == 1


def test_an_empty_answer_has_a_placeholder(page: Any, script: Script) -> None:
    script.answer = [token(1, " "), token(2, "\n"), *done(20, 2)]
    ask_and_wait(page, "hello")
    assert shown_answer(page) == "(the model answered with nothing visible)"
    assert page.text_content("#announcer") == "Model: (the model answered with nothing visible)"


@pytest.mark.parametrize(("width", "height"), [(360, 740), (640, 400), (320, 256)])
def test_narrow_and_magnified_windows_lose_nothing(
    scripted: Open, script: Script, snap: Any, width: int, height: int
) -> None:
    script.answer = [token(1, "unbreakable" * 40), *lantern()]
    viewport = {"width": width, "height": height}
    with scripted(viewport=viewport, device_scale_factor=2) as page:
        page.locator("#send:enabled").wait_for()
        snap(page, "start")
        page.click("summary")
        ask_and_wait(page, "unbreakable" * 20)
        widths = "[document.documentElement.scrollWidth, document.getElementById('main').scrollWidth]"
        assert max(page.evaluate(widths)) <= width
        for control in ("theme", "message", "send", "tokens", "temperature", "seed", "turns", "clear"):
            page.locator(f"#{control}").scroll_into_view_if_needed()
            page.click(f"#{control}", trial=True)  # nothing covers it
        page.locator(".token").last.hover()
        box = page.locator("#card").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        snap(page)


def test_the_log_follows_its_end_unless_one_reads_further_up(scripted: Open, script: Script) -> None:
    gate = Event()
    line = "a line of its own\n"
    script.answer = [token(1, line * 60), gate, token(2, line * 60), *done(20, 2)]
    gap = "main => main.scrollHeight - main.scrollTop - main.clientHeight"
    with scripted(viewport={"width": 360, "height": 740}) as page:
        page.locator("#send:enabled").wait_for()
        main = page.locator("#main")
        ask(page, "go")
        page.locator(".token").wait_for()
        assert main.evaluate(gap) < 2
        page.click("summary")
        page.wait_for_timeout(50)  # frames
        assert main.evaluate(gap) < 2
        main.evaluate("main => { main.scrollTop = 10 }")
        gate.set()
        page.locator(".meta").wait_for()
        assert main.evaluate("main => main.scrollTop") == 10


def test_reduced_motion_is_respected(scripted: Open, script: Script) -> None:
    script.answer = [token(1, "calm"), Event()]
    with scripted(reduced_motion="reduce") as page:
        page.locator("#send:enabled").wait_for()
        ask(page, "go")
        page.locator(".token").wait_for()
        assert page.evaluate("document.getAnimations({subtree: true}).length") == 0


def test_a_key_is_asked_for_where_keys_are_needed(scripted: Open, script: Script, snap: Any) -> None:
    script.health["keys"] = True
    script.answer = Refused(401, "a valid API key is required")
    with scripted() as page:
        page.expected = ["401"]
        page.locator("#send:enabled").wait_for()
        ask(page, "hello")
        expect(page.locator(".error .text")).to_have_text("a valid API key is required")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("sk-secret")
        snap(page)
        script.answer = answer("welcome")
        ask_and_wait(page, "hello")
        assert script.authorizations == [None, "Bearer sk-secret"]
        page.reload()
        page.locator("#send:enabled").wait_for()
        assert page.input_value("#key") == "sk-secret"  # for this tab's session
        assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(scripted: Open, script: Script, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    script.health["keys"] = True
    script.answer = lantern()
    with scripted(color_scheme=theme, bypass_csp=True, reduced_motion="reduce") as page:  # for axe's script
        page.expected = ["429"]
        page.locator("#send:enabled").wait_for()
        page.check("#turns")
        ask_and_wait(page, "where?")
        script.answer = Refused(429, "busy")
        ask(page, "and then?")
        page.locator(".error").wait_for()
        page.locator(".token").first.hover()
        expect(page.locator("#card")).to_be_visible()
        found = axe.run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] != "minor"] == []


def test_a_server_without_a_loaded_model_is_asked_all_the_same(scripted: Open, script: Script) -> None:
    loaded, script.health = script.health, {"status": "ok", "keys": False, "models": ["riftco"]}
    script.answer = answer("awake")
    with scripted() as page:
        page.locator("#send:enabled").wait_for()
        assert page.is_hidden("#details")
        script.health = loaded  # by the first question
        ask_and_wait(page, "hello")
        page.locator("#details").wait_for()
        assert "256 tokens" in page.inner_text("#notice")


# ---- the real server


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(bundle("bpe"), ServingConfig(backend="cpu", maximum_new_tokens=100_000)) as service:
        yield service


@pytest.fixture(scope="module")
def real_url(service: ModelService) -> Iterator[str]:
    with background_server(service) as url:
        yield url


@pytest.fixture
def real(usual: Visit, real_url: str) -> Iterator[Any]:
    """The page of the real server."""
    with usual.at(real_url) as page:
        page.locator("#send:enabled").wait_for()
        yield page


def test_the_real_server_is_shown(real: Any, service: ModelService) -> None:
    assert "context 16 vocabulary 290" in " ".join(real.inner_text("#details").split())
    assert real.get_attribute("#artifact", "title") == service.artifact_id
    assert real.get_attribute("#tokens", "max") == "100000"


def test_the_real_server_streams_what_it_would_answer_at_once(real: Any, service: ModelService) -> None:
    expected = service.generate(prompt_of("say"), max_new_tokens=8).text.removeprefix(prompt_of("say"))
    ask_and_wait(real, "say")
    assert shown_answer(real) == expected.strip()
    assert real.inner_text(".meta").startswith("8 tokens in")


def test_the_real_engine_stops_when_told_to(real: Any, service: ModelService, snap: Any) -> None:
    real.evaluate("document.getElementById('tokens').value = 100000")
    ask(real, "a story")
    real.locator(".token").nth(3).wait_for()
    real.click("#stop")
    real.locator(".meta", has_text="stopped").wait_for()
    assert len(shown_answer(real)) >= 4
    for _ in range(500):
        if service.engine.stats().requests_finished.get("cancelled"):
            break
        real.wait_for_timeout(10)
    stats = service.engine.stats()
    assert (stats.running, stats.waiting, stats.requests_finished["cancelled"]) == (0, 0, 1)
    snap(real)


def test_the_real_probabilities_name_their_alternatives(real: Any, service: ModelService, snap: Any) -> None:
    ask_and_wait(real, "say")
    real.locator(".token").nth(1).hover()
    shares = [float(share.strip("<%\u00a0 ")) for share in real.locator("#card .share").all_inner_texts()]
    assert len(shares) in (5, 6)
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.3  # rounded
    names = real.locator("#card code").all_inner_texts()
    assert not [name for name in names if re.fullmatch(r"#\d+", name)]  # texts, not ids
    snap(real)
