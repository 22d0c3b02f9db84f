"""Instruction records, the chat template and their JSONL files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riftco.data import (
    InstructionExample,
    PlainChatFormatter,
    format_parts,
    load_instructions,
    parse_instructions,
)
from riftco.errors import InputError
from tests.support import fixture

GOOD = b'{"prompt": "p", "response": "r"}\n'


def parse(data: bytes) -> tuple[InstructionExample, ...]:
    return parse_instructions(data, source="data.jsonl")


def refusal(data: bytes) -> str:
    with pytest.raises(InputError) as caught:
        parse(data)
    return str(caught.value)


def test_the_template_gives_the_recorded_texts() -> None:
    records = fixture("training.json")["post_training_full"]["examples"]
    formatter = PlainChatFormatter()
    texts = [formatter.format(InstructionExample(**record)) for record in records]
    assert texts == fixture("batching.json")["formatted"]


def test_only_ascii_white_space_is_trimmed() -> None:
    example = InstructionExample(" \t\n\r\f\v\u00a0p\u2003\v", "\x1cr\x85 \n")
    expected = "### User:\n\u00a0p\u2003\n### Assistant:\n\x1cr\x85\n"
    assert PlainChatFormatter().format(example) == expected


def test_the_prompt_is_the_start_of_the_whole_text() -> None:
    formatter, example = PlainChatFormatter(), InstructionExample(" why? ", "so")
    assert formatter.format_prompt(" why? ") == "### User:\nwhy?\n### Assistant:\n"
    assert formatter.format(example) == formatter.format_prompt(example.prompt) + "so\n"


@given(prompt=st.text().filter(lambda text: text.strip(" \t\n\r\f\v")), response=st.just(" so\n"))
def test_parts_are_the_prompt_as_served_and_what_completes_the_text(prompt: str, response: str) -> None:
    formatter, example = PlainChatFormatter(), InstructionExample(prompt, response)
    assert format_parts(formatter, example) == (formatter.format_prompt(prompt), "so\n")
    assert "".join(format_parts(formatter, example)) == formatter.format(example)


def test_a_formatter_whose_prompt_is_not_its_beginning_is_refused_by_name() -> None:
    class Late(PlainChatFormatter):
        def format(self, example: InstructionExample) -> str:
            return "Chat\n" + super().format(example)

    class Whole:
        def format(self, example: InstructionExample) -> str:
            return example.prompt + example.response

    example = InstructionExample("p", "r")
    with pytest.raises(InputError, match=r"Late gives the text 'Chat.*make format begin with format_prompt"):
        format_parts(Late(), example)
    with pytest.raises(InputError, match="Whole has no format_prompt"):
        format_parts(Whole(), example)


@pytest.mark.parametrize("blank", ["", " \t\n\r\f\v"])
def test_blank_text_is_refused(blank: str) -> None:
    with pytest.raises(InputError, match="prompt is blank"):
        InstructionExample(blank, "r")
    with pytest.raises(InputError, match="response is blank"):
        InstructionExample("p", blank)


def test_text_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(InputError, match="surrogate"):
        InstructionExample("p", "\ud800")
    with pytest.raises(TypeError, match="prompt is int"):
        InstructionExample(3, "r")  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]))
def test_any_record_survives_a_file_of_raw_characters(pairs: list[tuple[str, str]], newline: str) -> None:
    examples = tuple(InstructionExample(f"p{a}", f"r{b}") for a, b in pairs)
    lines = [json.dumps(e.identity, ensure_ascii=False) for e in examples]
    data = newline.join([*lines, ""]).encode("utf-8", "surrogatepass")
    assert parse(data) == examples


def test_unicode_line_ends_may_stand_inside_a_string() -> None:
    (example,) = parse('{"prompt": "a\u2028b\x85c\u2029", "response": "r"}'.encode())
    assert example.prompt == "a\u2028b\x85c\u2029"


def test_blank_lines_other_keys_and_a_byte_order_mark_are_passed_over() -> None:
    data = b'\xef\xbb\xbf\r\n{"prompt": "p", "category": [1], "response": "r"}\r\n \n' + GOOD
    assert parse(data) == (InstructionExample("p", "r"), InstructionExample("p", "r"))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]},
        {"instruction": " p", "input": "", "output": "r\n"},
        {"instruction": "p", "context": None, "response": "r", "category": "qa"},
        {"prompt": "p", "response": "r", "messages": [], "instruction": "q", "output": "s"},
        {
            "prompt": "x",
            "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}],
        },
        {"prompt": None, "instruction": "p", "output": "r"},
    ],
)
def test_records_of_other_shapes_are_the_same_record(record: dict) -> None:
    assert parse(json.dumps(record).encode()) == (InstructionExample("p", "r"),)


def test_a_dolly_record_is_the_contracts() -> None:
    raw = {"instruction": "Who?\n", "context": "Ann sat. ", "response": "Ann", "category": "closed_qa"}
    (example,) = parse(json.dumps(raw).encode())
    assert example.prompt == "Who?\n\nContext:\nAnn sat."
    alpaca = {"instruction": "Who?", "input": "Ann sat.", "output": "Ann"}
    assert parse(json.dumps(alpaca).encode())[0].prompt == "Who?\n\nInput:\nAnn sat."


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "p"', "is not strict JSON"),
        (b'{"prompt": "p", "prompt": "q", "response": "r"}', "occurs twice"),
        (b'{"prompt": "p", "response": "\\ud800"}', "is not strict JSON"),
        (b'{"prompt": "p", "response": NaN}', "NaN"),
        (b'["p", "r"]', "is not a JSON object; write"),
        (b'"text"', "is not a JSON object; write"),
        (b'{"prompt": "p"}', "lacks the key 'response'"),
        (b'{"prompt": 1, "response": "r"}', "prompt is int, not text"),
        (b'{"prompt": "p", "response": null}', "response is NoneType, not text"),
        (b'{"prompt": "p", "response": " \\t"}', "response is blank"),
        (b'{"prompt": "\xff"}', r"not UTF-8 (byte 0xff)"),
        (b"[" * 100_000, "is not strict JSON"),
        (b'{"messages": [{"role": "user", "content": "p"}]}', "got roles ['user']; leave others out"),
        (
            b'{"messages": [{"role": "system"}, {"role": "user"}, {"role": "assistant"}]}',
            "one of the user and one of the assistant, got roles ['system', 'user', 'assistant']",
        ),
        (b'{"messages": "hi"}', "got roles []"),
        (b'{"instruction": " ", "input": "x", "output": "r"}', "instruction is blank"),
        (b'{"instruction": "p", "input": 0, "output": "r"}', "input is int, not text"),
        (
            b'{"messages": [{"role": "user", "content": ["p"]}, {"role": "assistant", "content": "r"}]}',
            "prompt is list, not text",
        ),
        (b'{"instruction": "p"}', "has neither output nor response beside instruction"),
        (
            b'{"instruction": "p", "output": "r", "response": "r"}',
            "has ['output', 'response'] beside instruction",
        ),
        (b'{"instruction": 1, "output": "r"}', "instruction is int, not text"),
        (b'{"question": "p"}', "lacks the key 'prompt'; write prompt and response, messages, or instruction"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(line: bytes, problem: str) -> None:
    message = refusal(GOOD + b"\n" + line + b"\n" + GOOD)
    assert message.startswith("data.jsonl:3: ")
    assert problem in message


@pytest.mark.parametrize("data", [b"", b"\n \r\n"])
def test_a_file_without_records_is_refused(data: bytes) -> None:
    assert refusal(data).startswith("data.jsonl: has no records; ")


def test_a_file_is_loaded_by_path_and_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "some file.jsonl"
    path.write_bytes(GOOD)
    assert load_instructions(path) == (InstructionExample("p", "r"),)
    path.write_bytes(GOOD + b"no")
    with pytest.raises(InputError, match=r"some file\.jsonl:2: "):
        load_instructions(path)
    with pytest.raises(InputError, match="no such file"):
        load_instructions(tmp_path / "absent.jsonl")
