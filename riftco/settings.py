"""Settings from a YAML file and `a.b=c` assignments onto defaults, with errors people can act on."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from riftco.config.fields import Source
from riftco.errors import InputError

C = TypeVar("C", bound=BaseModel)


def load_config(defaults: C, file: Path | None = None, assignments: Iterable[str] = ()) -> C:
    """`defaults` with a YAML file's values, then the assignments, in that order.

    InputError names the field, the value and the nearest existing field for a misspelt one.
    """
    values = defaults.model_dump(mode="json")
    if file is not None:
        _merge(values, _read_yaml(file), source=str(file))
    for assignment in assignments:
        _merge(values, _parse_assignment(assignment, type(defaults)), source="--set")
    try:
        return type(defaults).model_validate(values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {_message(e)}" for e in error.errors()]
        raise InputError("; ".join(lines)) from None


def _message(error: Any) -> str:
    what = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    return what if isinstance(value, dict) else f"{what}, got {value!r}"


class _DuplicateKeyError(Exception):
    """A YAML mapping has a key twice: the last would silently replace the first."""


_KINDS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    "null": r"~|null|Null|NULL|",
    "merge": "<<",
}
"""Which texts are more than texts, as YAML 1.2's core schema has it, but decimal: 4e-3 is a number, and
0100, 1:30, no and 2024-01-01 are texts."""


class _Kinds:
    """Mixed into a YAML loader and dumper, so that both take the same texts for numbers."""

    yaml_implicit_resolvers: ClassVar[dict[str | None, list[tuple[str, re.Pattern[str]]]]] = {
        None: [(f"tag:yaml.org,2002:{kind}", re.compile(f"({text})$")) for kind, text in _KINDS.items()]
    }


class _Loader(_Kinds, yaml.SafeLoader):
    """Also without duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _DuplicateKeyError(
                    f"line {line}: {key.value} is on line {lines[key.value]} already; join them"
                )
            lines[key.value] = line
        return node


class _Dumper(_Kinds, yaml.SafeDumper):
    pass


def _read_yaml(file: Path) -> Mapping[str, Any]:
    try:
        values = _Loader(file.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError, _DuplicateKeyError) as error:
        raise InputError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise InputError(f"{file}: settings are a mapping such as 'pretraining: {{steps: 200}}'")
    return values


def _parse_assignment(assignment: str, config: type[BaseModel]) -> Mapping[str, Any]:
    path, equals, text = assignment.partition("=")
    if not (path and equals):
        raise InputError(f"--set {assignment}: write it as field.name=value")
    if not text.strip():
        raise InputError(f"--set {assignment}: has no value; write {path}=null for nothing, or quote it")
    names = path.split(".")
    try:
        value = _parse_value(text, is_text=_is_text(config, names))
    except _DuplicateKeyError as error:
        raise InputError(f"--set {assignment}: {error}") from None
    for name in reversed(names):
        value = {name: value}
    return value


def _is_text(kind: Any, names: Iterable[str]) -> bool:
    """Whether the setting under these names is a text: 9e0745 is then a digest, not a number."""
    for name in names:
        field = getattr(kind, "model_fields", {}).get(name)
        kind = field.annotation if field else None
    return kind in (str, str | None, Source, Source | None)


def _parse_value(text: str, *, is_text: bool) -> Any:
    """What YAML makes of it; a text setting's text as it stands, unless it is quoted or null."""
    if is_text and text[0] not in "'\"" and text not in ("null", "~"):
        return text
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: more digits than Python converts
        return text


def _merge(values: dict[str, Any], changes: Mapping[str, Any], source: str, prefix: str = "") -> None:
    for name, change in changes.items():
        if name not in values:
            raise InputError(_unknown(prefix + str(name), prefix, values, source))
        if isinstance(values[name], dict) and isinstance(change, Mapping):
            _merge(values[name], change, source, f"{prefix}{name}.")
        else:
            values[name] = change


def _unknown(path: str, prefix: str, values: Mapping[str, Any], source: str) -> str:
    name = path.removeprefix(prefix)
    within = [f"{group}.{name}" for group, own in values.items() if isinstance(own, dict) and name in own]
    near = within or difflib.get_close_matches(name, values, n=1)
    meant = " or ".join(prefix + one for one in near)
    hint = f"did you mean {meant}?" if near else f"there are {', '.join(values)}"
    return f"{source}: unknown setting {path}; {hint}"


def settings_help(config: type[BaseModel], **defaults: object) -> str:
    """The settings of a stage and their defaults, some of which a command has its own, for a help page."""
    fields = ", ".join(
        f"{name}={defaults.get(name, field.default)}" for name, field in config.model_fields.items()
    )
    return f"Settings and their defaults: {fields}"


def settings_yaml(config: BaseModel) -> str:
    """All settings as YAML that `load_config` reads back."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
