"""The chat page's document: whole, nothing from elsewhere, and a policy that fits it exactly."""

import re
from base64 import b64encode
from hashlib import sha256

import pytest

from riftco.serving import ModelService, background_server
from riftco.serving.http import app
from riftco.serving.http.page import page
from tests.riftco.serving.http.support import any_text_bundle, get
from tests.riftco.serving.http.wire import exchange


@pytest.mark.parametrize("element", ["style", "script"])
def test_the_policy_allows_the_one_inline_element_by_its_hash(element: str) -> None:
    document, policy = page()
    (text,) = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", document.decode(), re.DOTALL)
    digest = b64encode(sha256(text.encode()).digest()).decode()
    assert f"{element}-src 'sha256-{digest}';" in policy


def test_the_policy_allows_nothing_else() -> None:
    _, policy = page()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy


def test_the_page_is_put_together_when_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(app, "page", lambda: made.append(None) or page())
    with ModelService(any_text_bundle()) as service, background_server(service) as url:
        assert len(made) == 1
        assert {exchange(url, get(path)).body for path in ("/", "/chat")} == {page()[0]}
    assert len(made) == 1


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page()[0].decode()
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not a place
    assert not re.findall(r"\bsrc=|@import|url\(|import\(|<script src|<link rel=.stylesheet", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\son\w+=", text)
    assert not re.search(r"\sstyle=", text)  # the policy would refuse it
