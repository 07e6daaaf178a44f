"""Tables of config keys: pydantic models whose docstrings are the keys' meanings.

The checks, the messages about mistakes, and the tables of docs/config.md come from them.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config import aliases
from torchtune_grpo.config.text import ConfigError, shortened

T = TypeVar("T", bound="Keys")

SETTINGS = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    protected_namespaces=(),
    use_attribute_docstrings=True,
)
LARGEST_INT = 2**63 - 1
LARGEST_FLOAT32 = 3.4028234e38


def _number(value: Any) -> Any:
    """Turn a string into a number if it is one: YAML reads 1e-4 as a string."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _component(value: Any) -> Any:
    if isinstance(value, str) and "." in value:
        value = {"_component_": value}  # without arguments
    if isinstance(value, Mapping) and isinstance(value.get("_component_"), str):
        return DictConfig(value)
    raise ValueError("give a mapping with _component_, the dotpath of a class or function")


def _device(value: Any) -> Any:
    try:
        torch.device(value)
    except RuntimeError as error:
        raise ValueError("give cpu or cuda") from error
    return value


Float = Annotated[float, BeforeValidator(_number), Field(le=LARGEST_FLOAT32, ge=-LARGEST_FLOAT32)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
PositiveShare = Annotated[Float, Field(gt=0, le=1)]
Temperature = Annotated[Float, Field(ge=1e-6)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # given as a list
TokenIds = Annotated[tuple[Count, ...], Field(strict=False)]
Device = Annotated[str, AfterValidator(_device)]
Component = Annotated[DictConfig, BeforeValidator(_component)]
Components = Annotated[list[Component], Field(min_length=1)]


class Keys(BaseModel):
    """A table of config keys, each fully described by its type, default and docstring."""

    model_config = SETTINGS

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, checked again."""
        return type(self)(**{**dict(self), **changes})


def read(table: type[T], values: Mapping[str, Any]) -> T:
    """Read a table from plain values; raises a ConfigError with a sentence for each mistake."""
    try:
        return table.model_validate(values)
    except ValidationError as error:
        raise ConfigError(mistakes(error, table=table, values=values)) from None


def mistakes(error: ValidationError, *, table: type[Keys], values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each mistake that pydantic found."""
    found = []
    for each in error.errors():
        key = ".".join(map(str, each["loc"]))
        place, _, name = key.rpartition(".")
        field = dict(key_paths(table)).get(key)
        meaning = f" It is: {field.description}" if field is not None and field.description else ""
        value = each["input"]
        if each["type"] == "extra_forbidden":
            for path, inner in _leaves(key, value):
                near = did_you_mean(path, table=table, values=values)
                found.append(unknown_key(path, inner, near))
        elif each["type"] == "missing":
            found.append(f"{key}: missing from the config; give {key}=<value>.{meaning}")
        elif each["type"] == "model_type":
            inner = ", ".join(path for path, _ in key_paths(table) if path.startswith(f"{key}."))
            found.append(f"{key}={value!r}: this key holds others; set {inner}.")
        elif not each["loc"]:  # keys that contradict each other
            found += str(each["ctx"]["error"]).splitlines()
        else:
            found.append(f"{sentence(key, value, each)}{meaning}")
    return found


def unknown_key(key: str, value: Any, hint: str) -> str:
    """Return the message about a key that does not exist."""
    shown = shortened(str(value), 100)
    return f"{key}={shown}: unknown config key. {hint}`torchtune-grpo config` lists the keys."


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys below a key that is a mapping, such as verl's ``data.train_files``."""
    if isinstance(value, Mapping) and value and "_component_" not in value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def sentence(key: str, value: Any, error: Mapping[str, Any]) -> str:
    """Say what pydantic has found wrong with a key's value."""
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}={value!r}: {message}."


def key_paths(table: type[Keys], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key's path and field, a node before the keys below it."""
    for name, field in table.model_fields.items():
        yield f"{prefix}{name}", field
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Keys):
            yield from key_paths(field.annotation, f"{prefix}{name}.")


def did_you_mean(key: str, *, table: type[Keys], values: Mapping[str, Any]) -> str:
    """Suggest our key for another library's, the same name elsewhere, or the most similar one."""
    name = key.rpartition(".")[2]
    known = [path for path, _ in key_paths(table)]
    for node, value in values.items():
        if isinstance(value, Mapping) and "_component_" in value:
            known += [f"{node}.{argument}" for argument in parameters(value["_component_"]) or ()]
    same = [path for path in known if path.rpartition(".")[2] == name]
    foreign = aliases.meaning(key) or (None if same else aliases.meaning(key, ends=True))
    if foreign:
        return f"{foreign} "
    near = (
        same
        or difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        or difflib.get_close_matches(key.replace("eval_", "evaluation."), known, n=1)
    )
    return f"Did you mean {near[0]}? " if near else ""


def parameters(dotpath: Any) -> dict[str, inspect.Parameter] | None:
    """Return a component's parameters; None if it cannot be imported or has no signature."""
    try:
        component = _get_component_from_path(dotpath)
        try:
            return dict(inspect.signature(component, eval_str=True).parameters)
        except NameError:  # an annotation that is imported for type checkers alone
            return dict(inspect.signature(component).parameters)
    except Exception:  # whatever importing a user's module raises
        return None


def markdown_tables(table: type[Keys]) -> str:
    """Return the keys as a Markdown table, followed by one for each node."""
    nodes = {
        name: field.annotation
        for name, field in table.model_fields.items()
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Keys)
    }
    rows = []
    for name, field in table.model_fields.items():
        kind, default = _type_name(field.annotation), "required"
        if name in nodes:
            kind, default = "keys", "below"
        elif not field.is_required():
            value = list(field.default) if isinstance(field.default, tuple) else field.default
            default = OmegaConf.to_yaml({"x": value})[3:].strip()
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {kind} | {default} | {meaning} |")
    text = "\n".join(["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows])
    below = [f"### `{name}`\n\n{markdown_tables(inner)}" for name, inner in nodes.items()]
    return "\n\n".join([text, *below])


def _type_name(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_name(options[0])
    if origin is typing.Literal:
        return ", ".join(map(str, options))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_name, options))
    if origin in (tuple, list):
        return f"list of {_type_name(options[0])}"
    names = {"NoneType": "null", "DictConfig": "component"}
    return names.get(hint.__name__, hint.__name__)
