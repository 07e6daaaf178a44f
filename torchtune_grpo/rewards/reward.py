"""What a reward is, and how one is built from a node of the config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from omegaconf import OmegaConf
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.files import extend_import_path
from torchtune_grpo.config.text import describe
from torchtune_grpo.data.prompt import GIVEN
from torchtune_grpo.rewards.workers import FunctionWorker, WorkerPool

# reward(*, prompts: list[str], completions: list[str], **columns: list) -> list[float | None];
# None says that the reward does not apply to a completion. It is the interface of TRL's trainer.
# An async one gives that to await.
RewardFunction = Callable[..., Any]

F = TypeVar("F", bound=Callable[..., Any])
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OWN_KEYS: dict[str, Any] = {"name": None, "weight": 1.0, "format": "text", "isolation": None}
# Keys of `isolation: process`; without it they are the component's own arguments.
_ISOLATION_KEYS: dict[str, Any] = {"timeout": 10.0, "workers": 2}


@dataclass(eq=False)
class Reward:
    """A reward function, its weight in the total, and what it declares of itself.

    ``name`` is what metrics and errors call it. With the weight 0 it is only watched. With ``chat``
    prompts and completions are lists of messages and not texts. With ``workers`` it runs in these
    processes, one completion at a time, and ``function`` (there the class, if it is one) is only
    asked for its signature. The other fields are what the function has as attributes:

        decides       whether it tells right answers from wrong ones
        reward_gap    how much more than a wrong answer a right one gets at least
        reward_range  its lowest and its highest value
        check_row     one row's columns -> what is wrong with them, or None
        check_rows    columns of rows -> the same of those that it tries, by their positions
        answer_of     a text -> the answer that it sees there, or None, for votes among samples
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    chat: bool = False
    workers: WorkerPool[FunctionWorker] | None = None
    decides: bool = field(default=False, init=False)
    reward_gap: float = field(default=1.0, init=False)
    reward_range: tuple[float, float] | None = field(default=None, init=False)
    check_row: Callable[..., str | None] | None = field(default=None, init=False)
    check_rows: Callable[..., dict[int, str | None]] | None = field(default=None, init=False)
    answer_of: Callable[[str], str | None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        declared = getattr(self.function, "func", self.function)  # of a partial
        for name in ("decides", "reward_gap", "reward_range", "check_row", "answer_of"):
            setattr(self, name, getattr(declared, name, getattr(self, name)))
        if self.workers is None:  # or its object is elsewhere
            self.check_rows = getattr(declared, "check_rows", None)

    @property
    def is_async(self) -> bool:
        """Whether a call in this process gives something to await."""
        method = getattr(type(self.function), "__call__", None)  # noqa: B004
        functions = (self.function, method)
        return self.workers is None and any(map(inspect.iscoroutinefunction, functions))

    @property
    def fixed(self) -> dict[str, Any]:
        """The arguments that the config has fixed; a column of that name is not passed."""
        return self.function.keywords if isinstance(self.function, partial) else {}

    def check(self, key: str) -> None:
        """Raises a ValueError unless the weight is a number and the function takes columns."""
        where = f"{key} ({self.name})"
        is_number = isinstance(self.weight, (int, float)) and not isinstance(self.weight, bool)
        if not is_number or not math.isfinite(self.weight):
            raise ValueError(f"{where}.weight is {self.weight!r}; give a finite number.")
        try:
            signature = _signature(self.function)
        except (TypeError, ValueError) as error:  # not callable, or written in C
            raise ValueError(
                f"{where} is {self.function!r}, whose signature cannot be read ({error}); give a "
                "function reward(prompts, completions, **columns)."
            ) from error
        unnamed = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        if unnamed or not _takes_any_keyword(signature):
            problem = f"cannot be given {unnamed} by name" if unnamed else "refuses further columns"
            raise ValueError(
                f"{where} has the signature {signature} and {problem}; "
                "declare it as reward(prompts, completions, **columns)."
            )

    def check_columns(self, columns: Iterable[str], *, data: str = "dataset") -> None:
        """Raises a ValueError if ``data``, a key of the config, lacks a column that it needs."""
        present = sorted(columns)
        for name, required in _keywords(_signature(self.function)).items():
            if required and name not in present:
                raise ValueError(
                    f"The reward {self.name!r} needs the column {name!r}, but {data} has {present}"
                    f"{_nearest(name, present)}. Name the column that holds it, {data}.columns="
                    f"{{{name}: ...}}, or set {name} in the reward's node."
                )

    def row_faults(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """What ``check_row`` says of rows with the same columns: position -> what is wrong."""
        if self.check_row is None:
            return {}
        signature = inspect.signature(self.check_row)
        names = {*rows[0], *self.fixed}
        if not _takes_any_keyword(signature):
            names &= signature.parameters.keys()
        faults: dict[int, str] = {}
        for position, row in enumerate(rows):
            values = {**row, **self.fixed}
            try:
                fault = self.check_row(**{name: values[name] for name in names})
            except Exception as error:  # as in json.loads(answer)
                fault = describe(error)
            if fault is not None:
                faults[position] = str(fault)
        return faults

    def tried_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str | None]:
        """What ``check_rows`` says of rows: position of each that was tried -> what is wrong."""
        if self.check_rows is None:
            return {}
        names = inspect.signature(self.check_rows).parameters.keys() & rows[0].keys()
        return self.check_rows(**{name: [row[name] for row in rows] for name in names})

    def close(self) -> None:
        """Ends its processes, if it has some; the next call starts new ones."""
        close = getattr(self.workers or self.function, "close", None)
        if callable(close):
            close()


def declares(**attributes: Any) -> Callable[[F], F]:
    """Declares on a function what :class:`Reward` reads from it."""

    def declare(function: F) -> F:
        vars(function).update(attributes)
        return function

    return declare


def rewards_from_config(cfg: Sequence[Mapping[str, Any]] | None) -> list[Reward]:
    """Builds the rewards that a config's key ``rewards`` lists; there is at least one."""
    plain = OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg
    if not isinstance(plain, (list, tuple)) or not plain:
        raise ValueError(
            f"rewards is {plain!r}; give a list with at least one reward, such as "
            "- _component_: torchtune_grpo.rewards.math_correctness_reward"
        )
    return [_reward(node, f"rewards[{index}]") for index, node in enumerate(plain)]


def _reward(node: Any, key: str) -> Reward:
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, Mapping) or not isinstance(node.get("_component_"), str):
        raise ValueError(
            f"{key}._component_ is missing or not a text in {node!r}; give the dotpath of a "
            "reward, such as torchtune_grpo.rewards.math_correctness_reward"
        )
    component, own = _component(node["_component_"], key), {**_OWN_KEYS}
    if node.get("isolation") is not None:
        own |= _ISOLATION_KEYS
    own |= {name: node[name] for name in own if name in node}
    arguments = {k: v for k, v in node.items() if k not in own and k != "_component_"}
    _check_own(own, key)
    makes = _check_arguments(component, arguments, key, own)
    if not makes:
        function = partial(component, **arguments) if arguments else component
    elif own["isolation"] and inspect.isclass(component):  # the workers make the objects
        function = component
    else:
        function = component(**arguments)
    workers = None
    if own["isolation"]:
        make = partial(FunctionWorker, node["_component_"], arguments, makes=makes)
        workers = WorkerPool([make(timeout=own["timeout"]) for _ in range(own["workers"])])
    reward = component if not makes else function
    name = own["name"] or getattr(reward, "__name__", type(reward).__name__)
    return Reward(name, function, own["weight"], own["format"] == "chat", workers)


def _component(path: str, key: str) -> Callable[..., Any]:
    extend_import_path()
    try:
        component: Callable[..., Any] = _get_component_from_path(path)
        inspect.signature(component)
    except (InstantiationError, ValueError, TypeError) as error:
        raise ValueError(
            f"{key}._component_ is {path!r}, which is not a function or a class that can be "
            f"loaded: {error}"
        ) from error
    return component


def _check_own(own: Mapping[str, Any], key: str) -> None:
    """Checks a node's own keys; RewardSet checks weights, also those from no config."""
    name, timeout, workers = own["name"], own.get("timeout", 1), own.get("workers", 1)
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    remedies = {
        "name": None if name is None or str(name).strip() else "give a text that is not blank",
        "format": None if own["format"] in ("text", "chat") else "give one of text, chat",
        "isolation": None if own["isolation"] in (None, "process") else "give process, or null",
        "timeout": None if is_number and 0 < timeout < math.inf else "give seconds above 0",
        "workers": None if type(workers) is int and workers > 0 else "give 1 process or more",
    }
    for name, remedy in remedies.items():
        if remedy is not None:
            raise ValueError(f"{key}.{name} is {own[name]!r}; {remedy}.")


def _check_arguments(
    component: Callable[..., Any], arguments: dict[str, Any], key: str, own: Mapping[str, Any]
) -> bool:
    """Whether the component is called with its arguments to make the reward.

    That is so for a class, and for a function without ``**columns`` that takes no completions. A
    misspelt key, which a reward's ``**columns`` would swallow, is refused.
    """
    signature, is_class = inspect.signature(component), inspect.isclass(component)
    is_open = _takes_any_keyword(signature)
    makes = is_class or not (is_open or {*GIVEN[:3]} & signature.parameters.keys())
    known = [*_keywords(signature), *own]
    for name, value in arguments.items():
        if name not in _keywords(signature) and not (is_class and is_open):
            is_ours = name in _ISOLATION_KEYS
            hint = " (it goes with isolation: process)" if is_ours else _nearest(name, known)
            raise ValueError(
                f"{key}.{name} is {value!r}, but {component!r} has no such argument{hint}; "
                f"valid here: {known}"
            )
    if makes:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{key}: could not construct {component!r}: {error}") from error
    return makes


def _signature(function: RewardFunction) -> inspect.Signature:
    """The signature of a reward's call; of a class, that of its objects."""
    call: Any = function
    return inspect.signature(partial(call.__call__, None) if inspect.isclass(call) else call)


def _keywords(signature: inspect.Signature) -> dict[str, bool]:
    """The parameters that a column or a config can fill by name: name -> required."""
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in signature.parameters.values()
        if parameter.kind in _BY_KEYWORD and parameter.name not in GIVEN
    }


def _takes_any_keyword(signature: inspect.Signature) -> bool:
    """Whether there is a parameter such as ``**columns``."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that ``word`` was perhaps meant to be, or nothing."""
    matches = get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
