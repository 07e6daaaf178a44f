"""Adapters: each protocol that users' environments have, as conversations see it.

An adapter lives with its user's object in a process of its own (sandbox/remote.py). It knows
everything about the protocol, and all that it takes and returns is plain data. What the user's code
raises becomes an ``ObjectError``.
"""

from __future__ import annotations

import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchtune_grpo.config.text import describe, place_of
from torchtune_grpo.environments.results import (
    observation_of,
    reset_arguments,
    step_result,
    text_of,
)
from torchtune_grpo.sandbox.remote import ObjectError
from torchtune_grpo.sandbox.wire import NotPlain, dump
from torchtune_grpo.sandbox.worker import Wait, seed_generators


class Turn(NamedTuple):
    """A turn of the policy, with the calls of tools in it."""

    text: str
    calls: Sequence[Mapping[str, object]] = ()  # as in a message's tool_calls; or with an error
    is_closed: bool = False  # it ended with a stop token
    is_last: bool = False  # the policy has no other


class Reply(NamedTuple):
    """What an environment answers to a turn: messages, or else text."""

    messages: Sequence[dict[str, Any]] = ()  # that follow the turn
    text: str | None = None  # with which the policy's own message continues
    ended: str | None = None  # why the conversation is over, if it is: done or answered
    reward: float = 0.0
    calls: int = 0  # that were made
    failed_calls: int = 0


@contextmanager
def naming(method: str, function: Callable[..., object]) -> Iterator[None]:
    """Turn what a method raises, even SystemExit, into an ObjectError with the user's line."""
    try:
        yield
    except BaseException as error:
        place = place_of(error, function)
        raise ObjectError(f"{method}() raised {describe(error)}{place}") from error


class Adapter:
    """What all protocols share: ``reset``, ``get_reward``, ``close``, and a look from outside.

    ``environment`` is the user's object; None if there are functions alone.
    """

    role: str | None = None  # of the messages that it answers with; None: it answers with text
    adds_rewards = False  # its answers come with rewards

    def __init__(
        self, environment: Any, tools: Mapping[str, Callable[..., Any]], wait: Wait
    ) -> None:
        self.environment, self._tools, self._wait = environment, tools, wait

    def reset(self, row: Mapping[str, object], seed: int) -> str | None:
        """Begin a conversation about a row; return what is added to its prompt."""
        seed_generators(seed)
        if self.environment is None:
            return None
        reset = self.environment.reset
        with naming("reset", reset):
            seen = observation_of(self._wait(reset(**reset_arguments(reset, row, seed))))
            return None if seen is None else text_of(seen)

    def answer(self, turn: Turn) -> Reply:
        """Answer a turn of the policy."""
        raise NotImplementedError

    def reward(self) -> float | None:
        """Return what ``get_reward`` returns, None included."""
        get_reward = self.environment.get_reward
        with naming("get_reward", get_reward):
            value = self._wait(get_reward())
            return None if value is None else float(value)

    def look(self, name: str) -> tuple[str, object]:
        """Return an attribute as a value, or else what it is: a method, missing, not plain."""
        try:
            value = getattr(self.environment, name)
        except AttributeError as error:
            return "missing", str(error)
        if callable(value):
            return ("async method" if inspect.iscoroutinefunction(value) else "method"), None
        return _if_plain(value)

    def use(
        self, name: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[str, object]:
        """Call any method for a reward, and return its value like an attribute's."""
        method = getattr(self.environment, name)
        with naming(name, method):
            return _if_plain(self._wait(method(*args, **kwargs)))

    def close(self) -> None:
        """Let the user's object close what it holds."""
        if callable(close := getattr(self.environment, "close", None)):
            self._wait(close())


def _if_plain(value: object) -> tuple[str, object]:
    try:
        dump(value)
    except NotPlain:
        return "not plain", type(value).__name__
    return "value", value


class ToolAdapter(Adapter):
    """TRL's protocol: a class whose public methods are tools, or functions alone."""

    role = "tool"

    def answer(self, turn: Turn) -> Reply:
        """Make a turn's calls, but not those of the last turn: nobody would read the results."""
        if not turn.calls:
            return Reply(ended="answered")
        if turn.is_last:
            return Reply()
        messages, failed = zip(*map(self._result, turn.calls), strict=True)
        return Reply(messages, calls=len(messages), failed_calls=sum(failed))

    def _result(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return a message with the result of a call, or with its error, and whether it failed."""
        name, failed = call["function"]["name"], False
        tool = self._tools.get(name)
        try:
            if "error" in call:
                raise ValueError(call["error"])
            if tool is None:
                raise ValueError(f"Tool {name} not found.")
            content = text_of(self._wait(tool(**call["function"]["arguments"])))
        except Exception as error:  # the policy reads it
            failed, content = True, str({"error": str(error)})
        except BaseException as error:
            with naming(name, tool or self._result):
                raise error
        return {"role": "tool", "name": name, "content": content}, failed


class StepAdapter(Adapter):
    """A class with ``step(text)``, whose observation becomes a new message."""

    role: str | None = "user"
    adds_rewards = True

    def answer(self, turn: Turn) -> Reply:
        step = self.environment.step
        with naming("step", step):
            seen, reward, is_done = step_result(self._wait(step(turn.text)))
            if is_done:
                return Reply(ended="done", reward=reward)
            return self._reply(seen, turn, reward)

    def _reply(self, seen: object, turn: Turn, reward: float) -> Reply:
        return Reply(_messages(seen), reward=reward)


class InlineAdapter(StepAdapter):
    """The same, but the observation continues the policy's own message.

    The message is over if a stop token has closed it, or if there is no observation.
    """

    role = None

    def _reply(self, seen: object, turn: Turn, reward: float) -> Reply:
        text = "".join(each["content"] for each in _messages(seen))
        is_over = (turn.is_closed or not text) and not turn.is_last
        return Reply(text=text, reward=reward, ended="answered" if is_over else None)


def _messages(seen: Any) -> list[dict[str, Any]]:
    """Return an observation as messages: its own, or one of the user's."""
    is_list = isinstance(seen, list) and bool(seen)
    if is_list and all(isinstance(each, Mapping) and "role" in each for each in seen):
        return [{"role": str(each["role"]), "content": text_of(each["content"])} for each in seen]
    return [{"role": "user", "content": text_of(seen or "")}]


class Recipe(NamedTuple):
    """What an adapter is made of: classes and functions by their dotpaths, or else pickled."""

    adapter: type[Adapter]
    component: str | bytes | None  # makes the user's object
    arguments: Mapping[str, object]  # of the component
    functions: Mapping[str, str | bytes]  # tools by their names
    methods: Sequence[str] = ()  # of the user's object that are tools

    @property
    def dotpaths(self) -> list[str]:
        """What its process imports."""
        parts = (self.component, *self.functions.values())
        return [part for part in parts if isinstance(part, str)]

    def make(self, seed: int, wait: Wait) -> Adapter:
        """Make the adapter with a user's object of its own."""
        environment, component = None, _load(self.component)
        seed_generators(seed)
        if component is not None:
            with naming(component.__name__, component):
                environment = wait(component(**self.arguments))
        tools = {name: _load(function) for name, function in self.functions.items()}
        tools |= {name: getattr(environment, name) for name in self.methods}
        return self.adapter(environment, tools, wait)


def _load(component: str | bytes | None) -> Any:
    if isinstance(component, bytes):
        return pickle.loads(component)
    return None if component is None else pkgutil.resolve_name(component)
