"""Rewards, and how one is built from a node of the config."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from omegaconf import OmegaConf
from pydantic import Field

from torchtune_grpo.config.check import load_component, read
from torchtune_grpo.config.command_line import extend_import_path
from torchtune_grpo.config.keys import Float, Keys, PositiveFloat, Text
from torchtune_grpo.config.text import describe, suggest
from torchtune_grpo.data.chat import GIVEN
from torchtune_grpo.rewards.workers import MAX_WORKERS, FunctionWorker, WorkerPool
from torchtune_grpo.trajectory import Completion, Prompt

# reward(*, prompts: list[str], completions: list[str], **columns: list) -> list[float | None], as
# for TRL's trainer; None says that the reward does not apply to a completion. It may be async.
RewardFunction = Callable[..., Any]

F = TypeVar("F", bound=Callable[..., object])
Format = Literal["text", "chat", "completion"]  # the last is for rewards of this package


@dataclass(eq=False)
class Reward:
    """A reward function, its weight in the total, and the attributes that the function declares."""

    name: str
    function: RewardFunction
    weight: float = 1.0  # 0: only logged
    # What it gets of prompts and completions; None: what its function declares that it ``reads``,
    # or else messages if the row has them.
    format: Format | None = None
    workers: WorkerPool[FunctionWorker] | None = None  # where it runs, one completion at a time
    # Column -> value, or list of values: it scores only the rows that have these.
    only: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declared = getattr(self.function, "func", self.function)  # unwraps a partial
        reads = getattr(declared, "reads", None)
        self.format = self.format or (reads if reads in get_args(Format) else None)
        # Column -> the values in it that ``only`` admits.
        self._wanted = {n: v if isinstance(v, list) else [v] for n, v in self.only.items()}
        # Whether it tells right answers from wrong ones: they score at least 1 more.
        self.decides: bool = getattr(declared, "decides", False)
        # Its lowest and its highest value.
        self.reward_range: tuple[float, float] | None = getattr(declared, "reward_range", None)
        # One row's columns -> what is wrong with them; rows -> the same by position, if tried.
        self.check_row: Callable[..., str | None] | None = getattr(declared, "check_row", None)
        self.check_rows: Callable[..., dict[int, str | None]] = lambda rows: {}
        if self.workers is None:  # else its object is in another process
            self.check_rows = getattr(declared, "check_rows", self.check_rows)
        # A text -> the answer that it finds there, for votes among samples.
        self.answer_of: Callable[[str], str | None] | None = getattr(declared, "answer_of", None)

    @property
    def is_async(self) -> bool:
        """Whether a call in this process has to be awaited."""
        method = getattr(type(self.function), "__call__", None)  # noqa: B004
        functions = (self.function, method)
        return self.workers is None and any(map(inspect.iscoroutinefunction, functions))

    @property
    def file(self) -> str | None:
        """The file that its function or class is written in, if there is one."""
        function = getattr(self.function, "func", self.function)
        return getattr(sys.modules.get(function.__module__), "__file__", None)

    def read(self, prompt: Prompt, completion: Completion) -> tuple[object, object]:
        """Return a prompt and a completion in the reward's format."""
        match self.format or ("chat" if prompt.is_chat else "text"):
            case "text":
                return prompt.text, completion.text
            case "chat":
                return copy.deepcopy(prompt.messages), copy.deepcopy(completion.messages)
            case _:
                return prompt, completion

    @property
    def fixed(self) -> dict[str, object]:
        """The arguments that the config sets; columns of these names are not passed."""
        return self.function.keywords if isinstance(self.function, partial) else {}

    @property
    def columns(self) -> list[str]:
        """The columns that its function names."""
        return [*_keywords(_call_signature(self.function))]

    def check(self, key: str) -> None:
        """Check that the weight is finite and that the function takes any column."""
        where = f"{key} ({self.name})"
        if not math.isfinite(self.weight):
            raise ValueError(f"{where}: weight={self.weight}; give a finite number.")
        remedy = "give a function reward(prompts, completions, **columns)."
        try:
            signature = _call_signature(self.function)
        except (TypeError, ValueError) as error:  # not callable, or written in C
            raise ValueError(f"{where} has no signature ({error}); {remedy}") from error
        if not _takes_any_keyword(signature):
            raise ValueError(f"{where} takes only {signature}, not further columns; {remedy}")

    def check_columns(self, columns: Iterable[str], *, data: str = "dataset") -> None:
        """Check that ``data``, a key of the config, has the columns that the reward needs."""
        present = sorted(columns)
        for name, required in _keywords(_call_signature(self.function)).items():
            if required and name not in present:
                raise ValueError(
                    f"The reward {self.name!r} needs the column {name!r}, but {data} has {present}."
                    f"{suggest(name, present)} Name the column that holds it, {data}.columns="
                    f"{{{name}: ...}}, or set {name} in the reward's node."
                )

    def check_only(self, columns: Iterable[str], *, data: str = "dataset") -> None:
        """Check that ``data``, a key of the config, has the columns that ``only`` names."""
        present = sorted(columns)
        for name in self.only:
            if name not in present:
                only = f"The reward {self.name!r} has only={dict(self.only)}"
                raise ValueError(f"{only}, but {data} has {present}.{suggest(name, present)}")

    def applies_to(self, row: Mapping[str, object]) -> bool:
        """Whether it scores answers to a row with these columns, as far as ``only`` says."""
        return all(row.get(name) in values for name, values in self._wanted.items())

    def covers(self, other: Reward) -> bool:
        """Whether ``only`` has it score every row that another reward scores."""
        theirs = other._wanted
        return all(
            name in theirs and all(value in values for value in theirs[name])
            for name, values in self._wanted.items()
        )

    def excludes(self, other: Reward) -> bool:
        """Whether ``only`` keeps it from every row that another reward scores."""
        theirs = other._wanted
        return any(
            name in theirs and not any(value in values for value in theirs[name])
            for name, values in self._wanted.items()
        )

    def tried_faults(self, rows: Sequence[Mapping[str, object]]) -> dict[int, str | None]:
        """Apply ``check_rows`` to the rows that it scores: position -> what is wrong, or None."""
        own = [position for position, row in enumerate(rows) if self.applies_to(row)]
        found = self.check_rows([rows[position] for position in own]) if own else {}
        return {own[number]: fault for number, fault in found.items()}

    def row_faults(self, rows: Sequence[Mapping[str, object]]) -> dict[int, str | None]:
        """Apply ``check_row`` to the rows that it scores, which have the same columns, likewise."""
        if self.check_row is None:
            return {}
        signature = inspect.signature(self.check_row)
        takes_all, known = _takes_any_keyword(signature), signature.parameters
        faults: dict[int, str | None] = {}
        for position, row in enumerate(rows):
            if not self.applies_to(row):
                continue
            given = {**row, **self.fixed}
            values = {n: v for n, v in given.items() if takes_all or n in known}
            try:
                faults[position] = self.check_row(**copy.deepcopy(values))
            except Exception as error:  # as in json.loads(answer)
                faults[position] = describe(error)
        return faults

    def close(self) -> None:
        """End its processes, if it has any; the next call starts new ones."""
        close = getattr(self.workers or self.function, "close", None)
        if callable(close):
            close()


def declares(**attributes: object) -> Callable[[F], F]:
    """Decorate a function with attributes that ``Reward`` reads."""

    def declare(function: F) -> F:
        vars(function).update(attributes)
        return function

    return declare


class _Keys(Keys):
    """The keys of a reward's node that are not arguments of its component."""

    name: Text | None = None
    weight: Float = 1.0
    only: dict[str, object] = {}
    format: Literal["text", "chat"] | None = None
    isolation: Literal["process"] | None = None


class _IsolatedKeys(_Keys):
    """The keys that ``isolation: process`` adds; without it they are the component's arguments."""

    timeout: PositiveFloat = 10.0
    workers: int = Field(default=2, ge=1, le=MAX_WORKERS)


def make_reward(node: Mapping[str, Any], key: str, given: Any = None) -> Reward:
    """Build the reward that the node ``key`` describes; ``given`` is a component without a path."""
    node = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    table = _Keys if node.get("isolation") is None else _IsolatedKeys
    given_keys = {name: node[name] for name in table.model_fields if name in node}
    own = read(table, given_keys, below=f"{key}.")
    path = node["_component_"]
    arguments = {n: v for n, v in node.items() if n not in (*table.model_fields, "_component_")}
    component, signature = _load(path, key, given)
    # A class that isolates says so itself: one derived from it may have code that does not.
    if own.isolation and getattr(component, "__dict__", {}).get("isolates"):
        return make_reward({**node, "isolation": None}, key, given)
    is_class, takes_any = inspect.isclass(component), _takes_any_keyword(signature)
    if not (is_class and takes_any):
        _check_arguments(path, arguments, key, [*_keywords(signature), *table.model_fields])
    # A function that takes neither **columns nor completions makes a reward, and is not one.
    makes = is_class or not (takes_any or {*GIVEN[:3]} & signature.parameters.keys())
    function: RewardFunction = partial(component, **arguments) if arguments else component
    if makes:
        try:
            signature.bind(**arguments)
            # Only the workers make an object that is for them.
            function = component if is_class and own.isolation else component(**arguments)
        except (TypeError, ValueError) as error:
            what = f"could not construct {path}: {error}."
            if not is_class:
                form = "write f(prompts, completions, **columns)"
                what = f"{path} has no argument `completions`; {form}."
            raise ValueError(f"{key}: {what}") from error
    workers = None
    if isinstance(own, _IsolatedKeys):
        make = partial(FunctionWorker, path, arguments, makes=makes, timeout=own.timeout)
        workers = WorkerPool([make() for _ in range(own.workers)])
    reward = function if makes else component
    its_name = str(getattr(reward, "__name__", type(reward).__name__))
    name = own.name or "_".join([its_name, *map(str, own.only.values())])
    return Reward(name, function, own.weight, own.format, workers, own.only)


def _load(path: str, key: str, given: Any) -> tuple[Callable[..., Any], inspect.Signature]:
    """Load a component, unless it is given, and its signature."""
    extend_import_path()
    component = load_component(f"{key}._component_", path) if given is None else given
    try:
        return component, inspect.signature(component)
    except ValueError as error:  # some that are not written in Python
        raise ValueError(f"{key}._component_={path}: {error}.") from error


def _check_arguments(
    path: str, arguments: Mapping[str, object], key: str, known: list[str]
) -> None:
    """Refuse a misspelt key, which a reward's ``**columns`` would swallow."""
    for name, value in arguments.items():
        if name not in known:
            is_ours = name in _IsolatedKeys.model_fields
            hint = " It goes with isolation: process." if is_ours else suggest(name, known)
            raise ValueError(
                f"{key}.{name}={value!r}: {path} has no such argument.{hint} It takes "
                f"{', '.join(known)}."
            )


def _call_signature(function: RewardFunction) -> inspect.Signature:
    """Return the signature of a reward's call; for a class, of a call of its objects."""
    call: Any = function
    return inspect.signature(partial(call.__call__, None) if inspect.isclass(call) else call)


def _keywords(signature: inspect.Signature) -> dict[str, bool]:
    """List the parameters that a column or a config can fill: name -> whether it is required."""
    return {
        p.name: p.default is p.empty
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in GIVEN
    }


def _takes_any_keyword(signature: inspect.Signature) -> bool:
    """Whether there is a parameter such as ``**columns``."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
