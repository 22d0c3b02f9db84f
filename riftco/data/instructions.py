"""Instruction data: prompt and response records, the chat template, and their JSONL files."""

import os
from dataclasses import dataclass
from typing import Any, Protocol, cast

from artifacts import ArtifactError, parse_json
from riftco.chat_template import ASCII_WHITESPACE, PLAIN, ChatMessage
from riftco.data.text import decode_utf8, read_bytes, shown
from riftco.errors import InputError

_FIELDS = ("prompt", "response")


@dataclass(frozen=True, slots=True)
class InstructionExample:
    """One prompt and the response to learn; neither may be blank."""

    prompt: str
    response: str

    def __post_init__(self) -> None:
        for field in _FIELDS:
            _require_text(getattr(self, field), field)

    @property
    def identity(self) -> dict[str, str]:
        """What makes two examples the same record: exactly these two fields."""
        return {"prompt": self.prompt, "response": self.response}


class InstructionFormatter(Protocol):
    """Turns an example into the text a model is trained on; its class name goes into the metadata."""

    def format(self, example: InstructionExample) -> str: ...


class PromptFormatter(InstructionFormatter, Protocol):
    """A formatter that also renders a prompt alone, as serving does: what `format` begins with."""

    def format_prompt(self, prompt: str) -> str: ...


class PlainChatFormatter:
    """The contract's template; roles are marked by plain text, there are no special tokens.

    Prompt and response are trimmed of the six ASCII white-space characters only.
    """

    def format(self, example: InstructionExample) -> str:
        """The whole exchange, ended by a newline."""
        return f"{self.format_prompt(example.prompt)}{_trim(example.response)}\n"

    def format_prompt(self, prompt: str) -> str:
        """The exchange up to where the response begins; ValueError for a blank prompt."""
        return PLAIN.render([ChatMessage("user", prompt)])


def format_parts(formatter: InstructionFormatter, example: InstructionExample) -> tuple[str, str]:
    """The prompt as serving renders it, and the text that answers it: together what `format` gives.

    InputError when the formatter cannot render prompts, or `format` does not begin with the prompt.
    """
    name = type(formatter).__name__
    if not hasattr(formatter, "format_prompt"):
        raise InputError(f"the formatter {name} has no format_prompt to tell prompts from responses; add one")
    prompt, whole = cast(PromptFormatter, formatter).format_prompt(example.prompt), formatter.format(example)
    if not whole.startswith(prompt):
        raise InputError(
            f"the formatter {name} gives the text {whole[:40]!r}, which does not begin with its own prompt "
            f"{prompt[:40]!r}; make format begin with format_prompt"
        )
    return prompt, whole.removeprefix(prompt)


def load_instructions(path: str | os.PathLike[str]) -> tuple[InstructionExample, ...]:
    """The examples of a JSONL file; InputError `file:line: what is wrong; remedy`."""
    return parse_instructions(read_bytes(path), source=shown(path))


def parse_instructions(data: bytes, *, source: str) -> tuple[InstructionExample, ...]:
    """The examples of JSONL bytes: strict UTF-8, one JSON object a line, of one of three shapes.

    `prompt` and `response`; OpenAI's `messages`, one of the user and one of the assistant; or Alpaca's and
    Dolly's `instruction`, its `input` or `context` if any, and `output` or `response`. Other keys are ignored
    and blank lines skipped. Lines end at `\\n` (a `\\r` before it is dropped) and nowhere else: U+0085,
    U+2028 and their like may stand inside a string, where the original would break the line. InputError
    naming source and line; at least one record.
    """
    lines = enumerate(decode_utf8(data, source=source).split("\n"), start=1)
    examples = tuple(
        _parse_line(line.removesuffix("\r"), f"{source}:{number}") for number, line in lines if line.strip()
    )
    if not examples:
        raise InputError(f"{source}: has no records; write one JSON object with prompt and response a line")
    return examples


def _parse_line(line: str, where: str) -> InstructionExample:
    try:
        record: Any = parse_json(line.encode("utf-8"), what=f"{where}:")
    except ArtifactError as error:
        raise InputError(f"{error}; write one JSON object a line") from None
    if not isinstance(record, dict):
        raise InputError(f'{where}: is not a JSON object; write {{"prompt": ..., "response": ...}}')
    try:
        return InstructionExample(*_exchange(record))
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None


def _exchange(record: dict[str, Any]) -> tuple[Any, Any]:
    """A record's prompt and response, by its shape."""
    lacking = [field for field in _FIELDS if field not in record]
    if lacking and "messages" in record:
        return _of_messages(record["messages"])
    if lacking and "instruction" in record:
        return _of_instruction(record)
    if lacking:
        raise InputError(
            f"lacks the key {lacking[0]!r}; write prompt and response, messages, or instruction and output"
        )
    return record["prompt"], record["response"]


def _of_messages(messages: Any) -> tuple[Any, Any]:
    turns = messages if isinstance(messages, list) else []
    roles = [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
    if roles != ["user", "assistant"]:
        raise InputError(
            f"messages must be one of the user and one of the assistant, got roles {roles[:4]}; "
            "leave others out or make them part of the user's"
        )
    question, answer = turns
    return question.get("content"), answer.get("content")


def _of_instruction(record: dict[str, Any]) -> tuple[Any, Any]:
    """As the contract prepares Dolly: parts trimmed, the context below the instruction under its name."""
    answers = [field for field in ("output", "response") if field in record]
    if len(answers) != 1:
        raise InputError(f"has {answers or 'neither output nor response'} beside instruction; give one")
    _require_text(record["instruction"], "instruction")
    prompt = _stripped(record, "instruction")
    for field in ("input", "context"):
        if record.get(field) is not None and (text := _stripped(record, field)):
            prompt += f"\n\n{field.capitalize()}:\n{text}"
    return prompt, _stripped(record, answers[0])


def _stripped(record: dict[str, Any], field: str) -> str:
    return _text(record[field], field).strip()


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field} is {type(value).__name__}, not text; give it as a string")
    return value


def _require_text(value: object, field: str) -> None:
    value = _text(value, field)
    if not _trim(value):
        raise InputError(f"{field} is blank; write some text or leave the record out")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{field} holds half of a surrogate pair; write the whole character") from None


def _trim(text: str) -> str:
    return text.strip(ASCII_WHITESPACE)
