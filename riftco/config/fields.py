"""What all settings are made of: the kinds of their fields, and their base class."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

PositiveInt = Annotated[int, Field(strict=True, gt=0, le=2**32 - 1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Seed32 = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
Seed = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
OpenFraction = Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]

Source = Annotated[str, Field(min_length=1)]
"""A path or a name; an empty one would mean the folder that a process happens to be in."""

BackendChoice = Literal["auto", "cpu", "metal", "cuda", "tpu"]


class Config(BaseModel):
    """Base of all settings: immutable, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _complete_nested(cls, values: Any) -> Any:
        """What a nested mapping leaves out comes from the field's default, not from the nested class's."""
        if not isinstance(values, Mapping):
            return values
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return {name: _completed(value, defaults.get(name)) for name, value in values.items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Nested settings with the defaults of their field: a form fills in what the schema says."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Config):
                described = {"description": field.description} if field.description else {}
                schema["properties"][name] = _schema_of(field.default) | described
        return schema


def _completed(value: Any, default: Any) -> Any:
    if not (isinstance(value, Mapping) and isinstance(default, Config)):
        return value
    own = dict(default)
    return own | {name: _completed(part, own.get(name)) for name, part in value.items()}


def _schema_of(settings: Config) -> JsonSchemaValue:
    """The schema of settings with their own values as defaults."""
    schema = type(settings).model_json_schema()
    values = settings.model_dump(mode="json")
    for name, value in settings:
        if isinstance(value, Config):
            schema["properties"][name] = _schema_of(value)
        else:
            schema["properties"][name]["default"] = values[name]
    return schema | {"default": values}
