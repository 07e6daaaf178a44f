"""From YAML to a checked config, from a component's node to the component, and what is wrong."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from torchtune import utils
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config import aliases
from torchtune_grpo.config.keys import ENGINES, GRPOConfig, Keys, SamplingParams, without_effect
from torchtune_grpo.config.text import (
    ConfigError,
    flat,
    map_values,
    noted,
    shortened,
    suggest,
    told,
)

log = utils.get_logger("INFO")
Table = TypeVar("Table", bound=Keys)
Config = TypeVar("Config", bound=GRPOConfig)

# --- A whole config ------------------------------------------------------------------------------


def read_config(cfg: DictConfig, table: type[Config] = GRPOConfig) -> Config:  # type: ignore[assignment]
    """Read and check a config; raises a ConfigError with all mistakes.

    ``~/`` becomes the user's home, in ``cfg`` too. Settings without effect are logged. ``table``
    is a subclass if a recipe has keys of its own.
    """
    cfg.merge_with(map_values(_with_home, OmegaConf.to_container(cfg)))
    values = _resolved(cfg)
    problems: list[str] = []
    settings = None
    with noted(problems):
        settings = read(table, values)
    # An environment's node, which holds keys of its own, is checked when the environment is made.
    nodes = {**values, "environment": None} if settings is None else dict(settings)
    if settings is not None:
        nodes |= {"rollout.engine": settings.rollout.engine}
        with noted(problems):
            # One key has no default; the run's own stands there if this does not change it.
            changes = {"max_generated_tokens": 1, **settings.evaluation.sampling}
            read(SamplingParams, changes, below="evaluation.sampling.")
    for name, node in nodes.items():
        if isinstance(node, (dict, DictConfig)) and isinstance(node.get("_component_"), str):
            with noted(problems):
                check_component(name, DictConfig(node))
    if problems or settings is None:
        raise ConfigError(*problems)
    if os.environ.get("RANK", "0") == "0":
        for sentence in without_effect(settings):
            log.warning(f"No effect: {sentence}")
    return settings


def _with_home(key: str, value: Any) -> Any:
    is_path = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if is_path else value


def _resolved(cfg: DictConfig) -> dict[str, object]:
    """Return the config's values with every ``${...}`` resolved, without those still ``???``."""
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except InterpolationToMissingValueError:
        leaves = flat(OmegaConf.to_container(cfg))
        missing = [key for key, value in leaves.items() if value == "???"]
        problems = (f"{key}: missing from the config; give {key}=<value>." for key in missing)
        raise ConfigError(*problems) from None
    except OmegaConfBaseException as error:
        key = (error.full_key or "the config").replace("[", ".").replace("]", "")
        why = str(error.msg).splitlines()[0]
        raise ConfigError(f"{key}: {why}; correct the ${{...}}.") from error
    return {key: value for key, value in values.items() if value != "???"}


def read(table: type[Table], values: Mapping[str, object], *, below: str = "") -> Table:
    """Read a table from plain values; raises a ConfigError with a sentence for each mistake.

    ``below`` stands before each key: where the config has the table.
    """
    try:
        return table.model_validate(values)
    except ValidationError as error:
        found = [_mistakes(each, table, values) for each in _by_key(error.errors(), table)]
    raise ConfigError(*(f"{below}{problem}" for problem in chain(*found)))


def _by_key(errors: Iterable[Any], table: type[Keys]) -> list[dict[str, Any]]:
    """Join what pydantic says of each type that a key may have."""
    kinds = {key: typing.get_origin(field.annotation) for key, field in key_paths(table)}
    joined = dict[object, dict[str, Any]]()
    for error in errors:
        *above, _ = place = error["loc"] or ("",)
        if kinds.get(".".join(map(str, above))) in (typing.Union, types.UnionType):
            place = tuple(above)
        if place in joined:
            joined[place]["msg"] += f", or {_message(error).removeprefix('should be ')}"
        else:
            joined[place] = {**error, "loc": place if error["loc"] else ()}
    return [*joined.values()]


def _mistakes(error: Mapping[str, Any], table: type[Keys], values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each mistake in one of pydantic's errors."""
    key, value = ".".join(map(str, error["loc"])), error["input"]
    field = dict(key_paths(table)).get(key)
    meaning = f" It is: {field.description}" if field is not None and field.description else ""
    if error["type"] == "extra_forbidden":
        return [
            f"{path}={shortened(str(inner), 100)}: unknown config key."
            f"{did_you_mean(path, table=table, values=values)} `torchtune-grpo config` lists the "
            "keys."
            for path, inner in _leaves(key, value)
        ]
    if error["type"] == "missing":
        return [f"{key}: missing from the config; give {key}=<value>.{meaning}"]
    if error["type"] == "model_type":
        inner = [path for path, _ in key_paths(table) if path.startswith(f"{key}.")]
        listed = f"{', '.join(inner[:-1])} or {inner[-1]}"
        return [f"{key}={value!r}: {key} is a section; set {listed}."]
    if not error["loc"]:  # keys that contradict each other
        return str(error["ctx"]["error"]).splitlines()
    return [f"{sentence(key, value, error)}{meaning}"]


def sentence(key: str, value: object, error: Mapping[str, object]) -> str:
    """Say what pydantic has found wrong with a key's value."""
    return f"{key}={value!r}: {_message(error)}."


def _message(error: Mapping[str, object]) -> str:
    said = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return said.replace("a valid boolean", "True or False").replace("a valid tuple", "a valid list")


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the keys below a key that is a mapping, such as verl's ``data.train_files``."""
    if isinstance(value, Mapping) and value and "_component_" not in value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def key_paths(table: type[Keys], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key's path and field, a node before the keys below it."""
    for name, field in table.model_fields.items():
        yield f"{prefix}{name}", field
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Keys):
            yield from key_paths(field.annotation, f"{prefix}{name}.")


def did_you_mean(key: str, *, table: type[Keys], values: Mapping[str, object]) -> str:
    """Suggest our key for another library's, the same name elsewhere, or the most similar one."""
    name = key.rpartition(".")[2]
    known = ["algorithm", "base_config", *(path for path, _ in key_paths(table))]
    for node, value in values.items():
        if isinstance(value, Mapping) and "_component_" in value:
            known += [f"{node}.{argument}" for argument in parameters(value["_component_"]) or ()]
    same = [path for path in known if path.rpartition(".")[2] == name]
    return (
        (aliases.meaning(key) or (None if same else aliases.meaning(key, ends=True)))
        or suggest(key, same, cutoff=0)
        or suggest(key, known, cutoff=0.85)
        or suggest(key.replace("eval_", "evaluation."), known)
    )


# --- Components ----------------------------------------------------------------------------------


def instantiate(name: str, node: DictConfig | None, *args: Any, **kwargs: Any) -> Any:
    """Construct the component of the config's key ``name``; arguments given here come first.

    torchtune's ``instantiate`` would read these as a part of the config: ``${...}`` in a row of
    data would be resolved, and a million rows copied. Whatever the component raises becomes a
    ValueError: the key, followed by the component's own message.
    """
    if node is None:
        return None
    try:
        options: Any = OmegaConf.to_object(node)
        component = _get_component_from_path(options.pop("_component_"))
        return component(*args, **{**options, **kwargs})
    except ValidationError as error:
        found = [(".".join([name, *map(str, each["loc"])]), each) for each in error.errors()]
        raise ConfigError(
            # Without a place, it is about several arguments.
            *(sentence(key, e["input"], e) if e["loc"] else _message(e) for key, e in found)
        ) from error
    except Exception as error:
        if isinstance(error, ValueError) and node._component_.startswith("torchtune_grpo."):
            joint = "." if re.match(r"[\w.]+[:=]", str(error)) else ": "
            raise ValueError(f"{name}{joint}{error}") from error
        raise ValueError(
            f"{name}: could not construct {node._component_} with {arguments_of(node)}: {error}"
        ) from error


def arguments_of(node: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the arguments that a node gives its component."""
    return {key: value for key, value in node.items() if key != "_component_"}


def check_component(name: str, node: DictConfig, *, beside: Iterable[str] = ()) -> None:
    """Raise a ConfigError if a component cannot be imported or does not take an argument.

    Values are only checked against annotated types; the rest is up to the component. ``beside`` are
    the keys that stand beside its arguments, to suggest.
    """
    load_component(f"{name}._component_", node._component_)
    accepted = parameters(node._component_)
    if accepted is not None and (problems := [*_misfits(name, node, accepted, beside)]):
        raise ConfigError(*problems)


def load_component(key: str, dotpath: str) -> Any:
    """Import the class or function that a key names; a ConfigError says why it cannot be."""
    shown, near = dotpath.removeprefix(f"{ENGINES}."), ""
    try:
        component = _get_component_from_path(dotpath)
    except Exception as error:  # whatever a user's module raises
        component, why = None, "not an import path such as torch.optim.AdamW."
        module, _, name = shown.rpartition(".")
        if module in sys.modules and getattr(error.__cause__, "name", None) == dotpath:
            why = f"{module} has no {name!r}."
            near = suggest(dotpath, [f"{module}.{each}" for each in vars(sys.modules[module])])
        elif module:
            why = f"cannot be imported: {told(error)}"
    else:
        why = "not a class or function."
    if not callable(component):
        hint = near or _component_hint(key, dotpath).replace(f"{ENGINES}.", "")
        raise ConfigError(f"{key}={shown}: {why}{hint}")
    return component


def check_imports(name: str, node: DictConfig) -> None:
    """Raise a ConfigError if a component is going to import what is not installed.

    The component itself is not made: a logger of metrics would begin to log.
    """
    component: Any = _get_component_from_path(node._component_)
    try:
        source = inspect.getsource(component.__init__ if inspect.isclass(component) else component)
    except (OSError, TypeError):  # there is none, as of a class without a constructor
        return
    for line in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(line, ast.Import | ast.ImportFrom) and not getattr(line, "level", 0):
            module = getattr(line, "module", None) or line.names[0].name
            try:
                importlib.import_module(module)
            except ImportError as error:
                package = (error.name or module).partition(".")[0]
                needs = f"needs {package}; pip install {package}."
                raise ConfigError(f"{name}._component_={node._component_}: {needs}") from error


# Key -> modules whose classes and functions are suggested for a name that cannot be imported.
_HOMES = {
    "model": ("torchtune_grpo.models",),
    "tokenizer": ("torchtune_grpo.models",),
    "checkpointer": ("torchtune_grpo.models", "torchtune.training"),
    "prepare": ("torchtune_grpo.models.tiny", "torchtune_grpo.models.smollm2"),
    "dataset": ("torchtune_grpo.data",),
    "eval_dataset": ("torchtune_grpo.data",),
    "sampler": ("torchtune_grpo.data",),
    "rewards": ("torchtune_grpo.rewards",),
    "loss": ("torchtune_grpo.loss",),
    "rollout": (ENGINES,),
    "lr_scheduler": ("torchtune.training.lr_schedulers",),
    "metric_logger": ("torchtune.training.metric_logging",),
    "optimizer": ("torch.optim", "torchao.optim"),
}


def _component_hint(key: str, dotpath: str) -> str:
    """Suggest the full name of a component of ours, torch's or torchtune's."""
    node = re.split(r"[.\[]", key)[0]
    if node == "model" and "/" in dotpath:
        return " A model's folder is model_dir."
    known = [
        f"{home}.{name}"
        for home in _HOMES.get(node, ())
        for name, value in vars(importlib.import_module(home)).items()
        if callable(value) and value.__module__.startswith(home.rpartition(".")[0])
        if not name.startswith("_")
    ]
    holding = (path for path in known if dotpath.lower() in path.rpartition(".")[2].lower())
    near = suggest(dotpath, known, cutoff=0.5)
    return near or next((f" Did you mean {path}?" for path in holding), "")


def _misfits(
    name: str,
    node: DictConfig,
    accepted: Mapping[str, inspect.Parameter],
    beside: Iterable[str],
) -> Iterator[str]:
    """Yield what is wrong with the arguments in a component's node.

    A value is wrong by its parameter's annotation, as far as YAML can say it. A component that
    takes any keyword is only not given what is nearly one of its own arguments.
    """
    adapted = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    is_open = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    values: Any = OmegaConf.to_container(node)
    names = ", ".join(accepted) or "none"
    for argument, value in values.items():
        key, parameter = f"{name}.{argument}", accepted.get(argument)
        if argument == "_component_":
            continue
        if parameter is None or parameter.kind is parameter.VAR_KEYWORD:
            known = [*accepted, *beside]
            hint = suggest(str(argument), known, cutoff=0.85 if is_open else 0.6)
            hint = hint.replace("mean ", f"mean {name}.")
            foreign = aliases.meaning(key, ends=True)
            if foreign and (not hint or f"mean {name}." in foreign):
                hint = foreign
            if not is_open or f"mean {name}." in hint:
                taken = f"has no argument {argument!r}.{hint} It takes {names}."
                yield f"{key}={value}: {node._component_} {taken}"
        elif isinstance(value, str) and value == "???":
            yield f"{key}: missing; give {key}=<value>."
        elif value is not parameter.default:
            kind: Any = parameter.annotation
            try:
                adapter = TypeAdapter[object](
                    object if kind is parameter.empty else kind, config=adapted
                )
                adapter.validate_python(value, strict=not isinstance(value, list))
            except ValidationError as error:
                yield sentence(key, value, error.errors()[0])
            except Exception:  # an annotation that pydantic does not know
                pass


def parameters(dotpath: object) -> dict[str, inspect.Parameter] | None:
    """Return a component's parameters; None if it cannot be imported or has no signature."""
    try:
        component = _get_component_from_path(dotpath)
        try:
            return dict(inspect.signature(component, eval_str=True).parameters)
        except NameError:  # an annotation that is imported for type checkers alone
            return dict(inspect.signature(component).parameters)
    except Exception:  # whatever importing a user's module raises
        return None


# --- The keys as Markdown ------------------------------------------------------------------------


def markdown_table(table: type[Keys]) -> str:
    """Return a table's docstring, and a row for each of its keys, in Markdown."""
    lines = [
        f"{inspect.getdoc(table)}\n",
        "| Key | Type | Default | Meaning |",
        "|---|---|---|---|",
    ]
    for key, field in key_paths(table):
        kind, default, meaning = _type_name(field.annotation), "required", field.description or ""
        if isinstance(field.default, Keys):
            kind, default, meaning = "keys", "below", inspect.getdoc(field.default) or ""
        elif not field.is_required():
            value = list(field.default) if isinstance(field.default, tuple) else field.default
            default = OmegaConf.to_yaml({"x": value})[3:].strip()
        lines.append(f"| `{key}` | {kind} | {default} | {' '.join(meaning.split())} |")
    return "\n".join(lines)


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
