"""One rendering of conversations for training and serving."""

import pytest

from artifacts import ModelBundle
from riftco.chat_template import PLAIN, ChatMessage, chat_template
from riftco.data import InstructionExample, PlainChatFormatter
from tests.support import FIXTURES


def said(*contents: str) -> list[ChatMessage]:
    """User and assistant in turns."""
    return [ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(contents)]


def test_a_question_ends_where_its_answer_begins() -> None:
    assert PLAIN.render(said("What is a tensor?")) == "### User:\nWhat is a tensor?\n### Assistant:\n"


def test_a_conversation_goes_on_from_what_training_saw() -> None:
    """The first exchange is, to the byte, the text of a training example; then comes the next question."""
    example = InstructionExample(" What? \n", "\tThis.\v")
    rendered = PLAIN.render(said(example.prompt, example.response, "And then?"))
    assert rendered == PlainChatFormatter().format(example) + PLAIN.render(said("And then?"))


def test_a_prompt_is_what_training_masked() -> None:
    for prompt in (
        "Why?",
        " Why?\r\n",
        "### User:\nWhy?",
        "a\n\nb",
        "\N{NO-BREAK SPACE}Why?\N{NO-BREAK SPACE}",
    ):
        assert PLAIN.render(said(prompt)) == PlainChatFormatter().format_prompt(prompt)


def test_what_the_system_says_begins_the_first_question() -> None:
    system = [ChatMessage("system", " Be brief. \n"), ChatMessage("system", " ")]
    asked = said("Why?", "So.", "Why so?")
    assert PLAIN.render([*system, *asked]) == PLAIN.render(said("Be brief.\n\nWhy?", "So.", "Why so?"))


def test_only_ascii_white_space_is_trimmed() -> None:
    assert PLAIN.render(said(" \t\n\r\v\fx\u2003\f\v\r\n\t ")) == "### User:\nx\u2003\n### Assistant:\n"


def test_the_stop_string_begins_the_next_question() -> None:
    """A model that goes on after its answer writes the beginning of a turn that is not its own."""
    rendered = PLAIN.render(said("a", "answer", "b"))
    for stop in PLAIN.stop:
        assert rendered.partition("answer")[2].startswith(stop)
        assert stop not in PLAIN.render(said("a"))


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        ([], "end with a user message"),
        (["user", "assistant"], "end with a user message"),
        (["assistant"], "a assistant message"),
        (["system"], "end with a user message"),
        (["user", "user"], "a user message"),
        (["user", "assistant", "assistant"], "a assistant message"),
        (["user", "system", "user"], "a system message"),
    ],
)
def test_conversations_that_no_training_text_looks_like_are_refused(roles: list, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PLAIN.render([ChatMessage(role, "x") for role in roles])


@pytest.mark.parametrize("blank", ["", " \t\r\n\v\f"])
def test_a_blank_prompt_is_refused(blank: str) -> None:
    with pytest.raises(ValueError, match="prompt must not be blank"):
        PlainChatFormatter().format_prompt(blank)
    with pytest.raises(ValueError, match="prompt must not be blank"):
        PLAIN.render(said("a", "b", blank))
    assert PLAIN.render(said("a", blank, "b"))  # a model may have had nothing to say


@pytest.mark.parametrize("name", ["byte", "bpe", "bpe-lora-child", "bpe-qlora-child"])
def test_bundles_of_the_contract_have_the_plain_template(name: str) -> None:
    """What was tuned with it says so; what was never tuned gets it by default."""
    assert chat_template(ModelBundle.load(FIXTURES / f"{name}.rift").metadata) is PLAIN


def test_bundles_of_the_originals_labs_have_the_plain_template() -> None:
    assert chat_template({"formatter": "_FrozenInstructionFormatter"}) is PLAIN


def test_an_unknown_formatter_is_named() -> None:
    with pytest.raises(ValueError, match=r"'AlpacaFormatter'.*known are PlainChatFormatter"):
        chat_template({"formatter": "AlpacaFormatter"})
