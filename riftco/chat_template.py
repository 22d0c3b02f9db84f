"""How a conversation becomes the text a model reads: one function for training and for serving.

A template is known by the name of the formatter that post-training records in a bundle's metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant"]
ASCII_WHITESPACE = " \t\n\r\v\f"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Role
    content: str


class ChatTemplate(Protocol):
    """Renders conversations; `stop` are the strings with which a model would begin the next turn itself."""

    @property
    def name(self) -> str: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation up to where the assistant's answer begins; ValueError for one it cannot render."""


class PlainChat:
    """The contract's template: roles are marked by plain text, there are no special tokens.

    What is said is trimmed of the six ASCII white-space characters only.
    """

    name = "PlainChatFormatter"
    stop = ("\n### User:",)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """User and assistant in turns, the user first and last, and never with nothing to say.

        System messages before them begin the first question: the template has no turn of their own.
        """
        system = [message.content for message in takewhile(lambda one: one.role == "system", messages)]
        turns = list(messages[len(system) :])
        expected: Role = "user"
        for message in turns:
            if message.role != expected:
                raise ValueError(
                    f"a {message.role} message came where this model's template, {self.name}, has one of the "
                    f"{expected}; it knows user and assistant in turns, the user first and last, and system "
                    "messages before them"
                )
            if message.role == "user" and not message.content.strip(ASCII_WHITESPACE):
                raise ValueError("prompt must not be blank; say something")
            expected = "assistant" if expected == "user" else "user"
        if expected == "user":
            raise ValueError("a conversation must end with a user message, which the answer follows")
        said = [text for text in map(_trimmed, [*system, turns[0].content]) if text]
        turns[0] = ChatMessage("user", "\n\n".join(said))
        return "".join(map(_turn, turns)) + "### Assistant:\n"


def _turn(message: ChatMessage) -> str:
    return f"### {message.role.capitalize()}:\n{_trimmed(message.content)}\n"


def _trimmed(text: str) -> str:
    return text.strip(ASCII_WHITESPACE)


PLAIN = PlainChat()
_TEMPLATES: Mapping[str, ChatTemplate] = {
    PLAIN.name: PLAIN,
    "_FrozenInstructionFormatter": PLAIN,  # so the original's labs call it, which froze no other
}


def chat_template(metadata: Mapping[str, Any]) -> ChatTemplate:
    """The template that a bundle's metadata names; the plain one for a model that was never tuned.

    ValueError for a formatter of somebody's own, which this program cannot know.
    """
    name = metadata.get("formatter", PLAIN.name)
    if not isinstance(name, str) or name not in _TEMPLATES:
        raise ValueError(
            f"the model was tuned with the formatter {name!r}, whose template is unknown here; known are "
            f"{PLAIN.name}"
        )
    return _TEMPLATES[name]
