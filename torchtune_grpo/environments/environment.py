"""What the config's ``environment`` and ``tools`` make: kinds of environments, and their words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from omegaconf import DictConfig
from torchtune.config._utils import _get_component_from_path
from transformers.utils.chat_template_utils import get_json_schema

from torchtune_grpo.config.check import check_component
from torchtune_grpo.config.command_line import extend_import_path
from torchtune_grpo.config.keys import EnvironmentConfig
from torchtune_grpo.config.text import ConfigError, describe, shortened, suggest
from torchtune_grpo.data.chat import PromptEncoder, PromptText
from torchtune_grpo.environments.calls import Parser, find_parser
from torchtune_grpo.environments.replies import ReplyEncoder
from torchtune_grpo.environments.results import text_of
from torchtune_grpo.environments.sessions import Kind, Session, in_thread
from torchtune_grpo.models.tokenizer import HFTokenizer
from torchtune_grpo.rewards.reward import Reward

_NOT_TOOLS = ("reset", "step", "get_reward", "close")


@dataclass(frozen=True)
class Environment:
    """The kinds of environments of a run, and how a data set's prompts and answers are encoded.

    ``context`` is the most tokens of a prompt and its response. ``parse`` reads tool calls.
    """

    kinds: Mapping[str | None, Kind]
    settings: EnvironmentConfig
    encoder: PromptEncoder
    replies: ReplyEncoder
    parse: Parser | None
    context: int

    def kind_of(self, columns: Mapping[str, Any]) -> Kind:
        """Return the kind that a row of the data names, if there are several."""
        if None in self.kinds:
            return self.kinds[None]
        name = columns.get("environment")
        if name not in self.kinds:
            names = ", ".join(map(str, self.kinds))
            raise ValueError(
                f"environment: a row's column 'environment' is {shortened(repr(name))}; it has to "
                f"name one of {names}."
            )
        return self.kinds[name]

    def reset_row(self, columns: Mapping[str, Any], prompt: str) -> dict[str, Any]:
        """Return what ``reset`` gets: the row, without the column that chooses the environment."""
        is_chat = isinstance(prompt, PromptText) and prompt.is_chat
        row = {**columns, "prompt": prompt.messages if is_chat else str(prompt)}  # type: ignore[attr-defined]
        return row if None in self.kinds else {n: v for n, v in row.items() if n != "environment"}

    def prompt(
        self, kind: Kind, prompt: PromptText, tokens: list[int], seen: Any
    ) -> tuple[PromptText, list[int]]:
        """Add what ``reset`` returned to a prompt's last message, and encode it."""
        if seen is None and None in self.kinds:
            return prompt, tokens
        encoder, more = self.encoder, text_of(seen) if seen else ""
        if None not in self.kinds:
            encoder = encoder.with_tools(kind.schemas)
        turns = prompt.messages
        text = (turns[-1]["content"] or "") + more
        turns[-1] = turns[-1] | {"content": text}
        encoded = encoder(turns if encoder.is_chat else text)
        return PromptText(text, turns, is_chat=prompt.is_chat), encoded

    def encode(self, new: Sequence[Mapping[str, Any]], *, is_closed: bool) -> list[int]:
        """Encode what follows a turn; ``is_closed``: a stop token has ended that."""
        if self.settings.form == "inline":
            return self.replies.inline("".join(each["content"] for each in new))
        return self.replies(new, ended=is_closed)

    def check_sessions(self, columns: Mapping[str, Any], prompt: str) -> None:
        """Begin two conversations about a row at once; raises a ValueError if that fails."""
        kind, sessions = self.kind_of(columns), list[Session]()
        if kind.make is None:
            return
        for is_second in (False, True):
            try:
                sessions.append(in_thread(kind.session).result(timeout=self.settings.timeout))
                begun = in_thread(sessions[-1].reset, self.reset_row(columns, prompt))
                begun.result(timeout=self.settings.timeout)
            except BaseException as error:
                for session in sessions:
                    session.close()
                count, remedy = "a session", "correct it, or its arguments."
                if is_second:
                    count = "a second session beside the first"
                    remedy = (
                        "the conversations of a step are held at once, so let its server take as "
                        "many (OpenEnv: max_concurrent_envs)."
                    )
                raise ValueError(
                    f"environment ({kind.name}): {count} could not begin: {describe(error)}; "
                    f"{remedy}"
                ) from error
        kind.idle.extend(sessions)


def make_kinds(
    settings: EnvironmentConfig,
    tools: Sequence[str],
    objects: Mapping[str, Any] | None = None,
) -> dict[str | None, Kind]:
    """Make the kinds of environments that a config names; without any, the tools' alone, if any.

    ``objects`` are classes and functions that no config can name, by their key. Raises a
    ConfigError if one lacks what an environment or a tool needs.
    """
    objects = objects or {}
    extend_import_path()
    functions = {}
    for number, path in enumerate(tools):
        key = f"tools[{number}]"
        function = objects.get(f"tools.{number}") or _load(key, path)
        functions[function.__name__] = (function, path, _schema(key, function))
    shared = {name: function for name, (function, _, _) in functions.items()}
    schemas = [schema for _, _, schema in functions.values()]
    kinds: dict[str | None, Kind] = {}
    for name, node in settings.components.items():
        key = "environment" if name is None else f"environment.{name}"
        kinds[name] = _kind(key, node, objects.get(key), shared, schemas, settings.timeout)
    if not kinds and functions:
        kinds[None] = Kind("tools", None, shared, schemas, settings.timeout)
    if settings.isolation is None:
        return kinds
    if unnamed := [key for key in objects if key.startswith(("environment", "tools."))]:
        raise ConfigError(
            f"environment.isolation=process: {unnamed[0]} has to be in a module of its own."
        )
    paths = {name: path for name, (_, path, _) in functions.items()}
    nodes = settings.components
    return {
        name: replace(kind, hosted=_hosted(nodes.get(name, {}), paths))
        for name, kind in kinds.items()
    }


def _hosted(node: Mapping[str, Any], tools: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``Hosted`` for an environment and tools, by their dotpaths."""
    return {"environment": node.get("_component_"), "arguments": _arguments(node), "tools": tools}


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_component_"}


def _kind(
    key: str,
    node: Any,
    component: Any,
    functions: Mapping[str, Callable[..., Any]],
    schemas: Sequence[Mapping[str, Any]],
    timeout: float,
) -> Kind:
    """Look at one environment's class, or at an object if a function makes it."""
    if not isinstance(node, Mapping) or not isinstance(node.get("_component_"), str):
        meant = suggest(key, (f"environment.{own}" for own in EnvironmentConfig.model_fields))
        raise ConfigError(
            f"{key}={shortened(repr(node))}: unknown key of environment.{meant} An environment is "
            "a mapping with _component_, the dotpath of a class or function."
        )
    path = node["_component_"]
    if component is None:
        beside = EnvironmentConfig.model_fields if key == "environment" else ()
        check_component(key, DictConfig(dict(node)), beside=beside)
        component = _load(key, path)
    make = partial(component, **_arguments(node))
    of = component
    if not inspect.isclass(component):
        try:
            of = type(make())
        except Exception as error:
            raise ConfigError(f"{key}: could not construct {path}: {describe(error)}") from error
    if not callable(getattr(of, "reset", None)):
        raise ConfigError(f"{key}._component_={path}: has no method reset(**row); add one.")
    has_step = callable(getattr(of, "step", None))
    found = inspect.getmembers(of, inspect.isfunction)
    methods = [n for n, _ in found if not n.startswith("_") and n not in _NOT_TOOLS]
    methods = [] if has_step else methods
    if has_step and functions:
        raise ConfigError(f"tools: {path} has step(text), which gets turns as text; remove one.")
    if not (has_step or methods or functions):
        raise ConfigError(f"{key}._component_={path}: has neither step(text) nor a public method.")
    own = [_schema(f"{key}._component_={path}.{name}", getattr(of, name), True) for name in methods]
    return Kind(
        of.__name__,
        make,
        functions,
        [*schemas, *own],
        timeout,
        methods=methods,
        has_step=has_step,
        has_reward=callable(getattr(of, "get_reward", None)),
    )


def _load(key: str, path: str) -> Any:
    try:
        return _get_component_from_path(path)
    except Exception as error:
        raise ConfigError(f"{key}={path}: cannot be imported: {describe(error)}") from error


def _schema(key: str, function: Callable[..., Any], is_method: bool = False) -> Mapping[str, Any]:
    """Return the JSON schema of a tool, from its type hints and its Google docstring."""
    try:
        if is_method and not isinstance(function, staticmethod):
            function = function.__get__(object())  # without self
        return get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{key}: a tool needs type hints, and a docstring that describes it and each argument "
            f"(Args:): {describe(error)}"
        ) from error


def environment_rewards(kinds: Mapping[str | None, Kind]) -> list[Reward]:
    """Return the rewards that environments give themselves, named after their classes."""
    names = dict.fromkeys(k.name for k in kinds.values() if k.has_step or k.has_reward)
    return [Reward(name, partial(_own_reward, kind=name), chat=False) for name in names]


def _own_reward(*, completions: Sequence[Any], kind: str, **columns: Any) -> list[Any]:
    """Return what the environments of a kind gave; None for completions of others."""
    return [each.reward if getattr(each, "kind", None) == kind else None for each in completions]


def prompt_tokenizer(kinds: Mapping[str | None, Kind], tokenizer: Any) -> Any:
    """Return the tokenizer for prompts, which describes the tools if all rows have the same."""
    if kinds and not isinstance(tokenizer, HFTokenizer):
        raise ValueError(
            f"environment: {type(tokenizer).__name__} has no chat template to write answers with; "
            "set tokenizer to torchtune_grpo.models.hf_tokenizer."
        )
    schemas = kinds[None].schemas if None in kinds else ()
    return tokenizer.with_tools(schemas) if schemas else tokenizer


def make_environment(
    kinds: Mapping[str | None, Kind],
    settings: EnvironmentConfig,
    *,
    encoder: PromptEncoder,
    tokenizer: HFTokenizer,
    context: int,
) -> Environment:
    """Make the environment of a data set's prompts; raises a ValueError if the template cannot."""
    uses_tools = any(kind.schemas for kind in kinds.values())
    if not encoder.is_chat and (uses_tools or settings.form == "message"):
        raise ValueError(
            "environment: a new message needs a chat format; set chat=True in the data set, or "
            "environment.form=inline, for an environment that has step(text)."
        )
    if uses_tools and settings.form == "inline":
        raise ValueError("environment.form=inline: needs an environment that has step(text).")
    parse = None
    if uses_tools:
        parse = find_parser(partial(tokenizer.chat_text, add_generation_prompt=False))
    uses_steps = any(kind.has_step for kind in kinds.values())
    roles = [r for r, used in (("tool", uses_tools), ("user", uses_steps)) if used]
    replies = ReplyEncoder(tokenizer, roles=() if settings.form == "inline" else roles)
    return Environment(kinds, settings, encoder, replies, parse, context)
