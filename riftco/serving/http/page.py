"""The chat page as one document, and the Content-Security-Policy that lets a browser run nothing else."""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from string import Template

_SCRIPTS = ("client", "conversation", "exchange", "alignment", "inspector", "log", "chat")

# Trusted Types make the browser itself refuse to parse text as HTML; data: is the icon's.
_POLICY = Template(
    "default-src 'none'; connect-src 'self'; img-src data:; style-src '$style'; script-src '$script'; "
    "require-trusted-types-for 'script'; trusted-types 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def page() -> tuple[bytes, str]:
    """The UTF-8 HTML document, style and script inline, and the policy that allows exactly these two."""
    folder = files("riftco.serving.http").joinpath("chat")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    parts = {"style": read("chat.css"), "script": "\n".join(read(f"{name}.js") for name in _SCRIPTS)}
    document = Template(read("chat.html")).substitute(parts).encode()
    return document, _POLICY.substitute({name: _source(text) for name, text in parts.items()})


def _source(text: str) -> str:
    """The source expression that matches an inline element with this text."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
