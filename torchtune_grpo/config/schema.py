"""Config tables: dataclasses whose fields carry a meaning and a range, read from YAML and printed.

A field's type says what a key takes: ``int``, ``float | None``, ``tuple[int, ...]`` (a list),
``DictConfig`` (a component), or another table (a node of keys).
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, field
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_grpo.config.components import component_parameters, unusable_number
from torchtune_grpo.config.errors import Problems

T = TypeVar("T")


def key(
    doc: str, default: Any = MISSING, *, valid: Callable[[Any], bool] | None = None, hint: str = ""
) -> Any:
    """Declares a config key: its meaning, its default, what values it takes and the remedy."""
    return field(default=default, metadata={"doc": doc, "valid": valid, "hint": hint})


def positive(doc: str, default: Any = MISSING) -> Any:
    """Declares a key that takes a number above 0 (or null where its type allows it)."""
    return key(doc, default, valid=lambda v: v is None or v > 0, hint="give a number above 0")


def not_negative(doc: str, default: Any = MISSING) -> Any:
    """Declares a key that takes a number from 0 on."""
    return key(doc, default, valid=lambda v: v >= 0, hint="give 0 or more")


def share(doc: str, default: Any = MISSING, *, above_0: bool = False) -> Any:
    """Declares a key that takes a number from 0, or above it, to 1 (or null)."""
    return key(
        doc,
        default,
        valid=lambda v: v is None or 0 < v <= 1 or v == 0 and not above_0,
        hint=f"give a share in {'(' if above_0 else '['}0, 1]",
    )


def temperature(doc: str, default: float | None) -> Any:
    """Declares a key that takes a temperature to train with (or null)."""
    hint = "give a number above 0, at least 1e-6"
    return key(doc, default, valid=lambda v: v is None or v >= 1e-6, hint=hint)


def one_of(doc: str, default: str | None, options: tuple[str, ...]) -> Any:
    """Declares a key that takes one of some words (or null where its type allows it)."""
    words = ", ".join(options)
    return key(
        f"{doc} ({words})",
        default,
        valid=lambda v: v is None or v in options,
        hint=f"give one of {words}",
    )


def check_ranges(table: Any, prefix: str = "") -> None:
    """Raises a ValueError if a field's value is out of its range, naming key, value and remedy."""
    for f in dataclasses.fields(table):
        _check_range(f, getattr(table, f.name), prefix)


def _check_range(f: dataclasses.Field[Any], value: Any, prefix: str) -> None:
    valid = f.metadata.get("valid")
    wrong = unusable_number(value, finite=True)
    if wrong is not None:
        raise ValueError(f"{prefix}{f.name}={value}: {wrong}.{_meaning(f)}")
    if valid is not None and not valid(value):
        raise ValueError(f"{prefix}{f.name}={value}: {f.metadata['hint']}.{_meaning(f)}")


def read_table(table: type[T], cfg: DictConfig, problems: Problems) -> T | None:
    """A mapping as an instance of a table; what is wrong with its keys is noted.

    Where a value is wrong, its default takes its place; without one, there is no instance.
    """
    return _read(table, cfg, problems, root=(table, cfg))


def _read(
    table: type,
    cfg: DictConfig,
    problems: Problems,
    *,
    root: tuple[type, DictConfig],
    prefix: str = "",
) -> Any:
    fields = {f.name: f for f in dataclasses.fields(table)}
    hints = typing.get_type_hints(table)
    for name, value in cfg.items_ex(resolve=False):
        if name not in fields:
            near = _did_you_mean(str(name), list(fields), root=root, prefix=prefix)
            problems.append(
                f"{prefix}{name}={value}: unknown config key.{near} "
                "`torchtune-grpo config` lists the keys."
            )
    values = {}
    for name, f in fields.items():
        with problems.noted():
            if name not in cfg or OmegaConf.is_missing(cfg, name):
                if f.default is MISSING:
                    raise ValueError(_missing(f, prefix))
            elif not dataclasses.is_dataclass(hints[name]):
                value = _converted(prefix, f, cfg[name], hints[name])
                _check_range(f, value, prefix)
                values[name] = value
            elif isinstance(cfg[name], DictConfig):
                inner = f"{prefix}{name}."
                values[name] = _read(hints[name], cfg[name], problems, root=root, prefix=inner)
            else:
                keys = ", ".join(f"{name}.{key.name}" for key in dataclasses.fields(hints[name]))
                raise ValueError(
                    f"{prefix}{name}={cfg[name]!r}: holds keys of its own; set {keys}."
                )
    needed = {name for name, f in fields.items() if f.default is MISSING}
    return table(**values) if needed <= values.keys() else None


def missing_keys(table: type, cfg: DictConfig) -> list[str]:
    """A sentence for each key at the top whose value is still ``???``."""
    return [_missing(f) for f in dataclasses.fields(table) if OmegaConf.is_missing(cfg, f.name)]


def _missing(f: dataclasses.Field[Any], prefix: str = "") -> str:
    name = prefix + f.name
    return f"{name}: missing from the config; give {name}=<value>.{_meaning(f)}"


def _did_you_mean(
    name: str, siblings: list[str], *, root: tuple[type, DictConfig], prefix: str
) -> str:
    """The same name elsewhere in the config, else the nearest one beside it."""
    table, cfg = root
    elsewhere = [path for path, _ in _paths(table) if path.rpartition(".")[2] == name]
    elsewhere += [
        f"{node}.{name}"
        for node, value in cfg.items_ex(resolve=False)
        if isinstance(value, Mapping)
        and name in (component_parameters(value.get("_component_")) or ())
    ]
    near = [prefix + close for close in difflib.get_close_matches(name, siblings, n=1)]
    found = elsewhere + near
    return f" Did you mean {found[0]}?" if found else ""


def _converted(prefix: str, f: dataclasses.Field[Any], value: Any, hint: Any) -> Any:
    """The value as its key's type, where YAML has another for it."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if isinstance(value, ListConfig) and all(type(v) is item for v in value):
            return tuple(value)
        options = ()
    if float in options and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 1e-4 as a string and 1 as an integer
            value = float(value)
        except ValueError:
            pass
    wrong_bool = isinstance(value, bool) and bool not in options
    if wrong_bool or not isinstance(value, options):
        wanted = _type_name(hint).replace("component", "a mapping with _component_")
        raise ValueError(f"{prefix}{f.name}={value!r}: not of type {wanted}.{_meaning(f)}")
    return value


def _meaning(f: dataclasses.Field[Any]) -> str:
    return f" It is: {f.metadata['doc']}." if "doc" in f.metadata else ""


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"list of {typing.get_args(hint)[0].__name__}"
    names = {"NoneType": "null", "DictConfig": "component", "ListConfig": "list"}
    options = typing.get_args(hint) or (hint,)
    return " or ".join(names.get(option.__name__, option.__name__) for option in options)


def _paths(table: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every key's path and field, a node's own row before its keys."""
    hints = typing.get_type_hints(table)
    for f in dataclasses.fields(table):
        yield f"{prefix}{f.name}", f
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _paths(hints[f.name], f"{prefix}{f.name}.")


def component_keys(table: type) -> set[str]:
    """The keys at a table's top that hold a component."""
    hints = typing.get_type_hints(table).items()
    return {name for name, hint in hints if DictConfig in (hint, *typing.get_args(hint))}


def markdown_tables(table: type) -> str:
    """The keys as a Markdown table, followed by one for each node."""
    hints = typing.get_type_hints(table)
    nodes = [f.name for f in dataclasses.fields(table) if dataclasses.is_dataclass(hints[f.name])]
    rows = []
    for f in dataclasses.fields(table):
        kind, default = _type_name(hints[f.name]), "required"
        if f.name in nodes:
            kind, default = "keys", "below"
        elif f.default is not MISSING:
            value = list(f.default) if isinstance(f.default, tuple) else f.default
            default = OmegaConf.to_yaml({"x": value})[3:].strip()
        rows.append(f"| `{f.name}` | {kind} | {default} | {f.metadata['doc']} |")
    text = "\n".join(["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows])
    below = [f"### `{name}`\n\n{markdown_tables(hints[name])}" for name in nodes]
    return "\n\n".join([text, *below])
