"""What a reward is, and the checks that need only its signature."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from torchtune_grpo.config.text import describe
from torchtune_grpo.sandbox.contract import GIVEN

# reward(*, prompts: list[str], completions: list[str], **columns: list) -> list[float | None];
# None says that the reward does not apply to a completion. It is the interface of TRL's trainer.
# An async one gives that to await.
RewardFunction = Callable[..., Any]

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Reward:
    """One reward.

    Args:
        name (str): what it is called in metrics and errors; unique within a set.
        function (RewardFunction): called with the keywords prompts, completions and every column.
        weight (float): its factor in the total; with 0 it is only watched.
        chat (bool): whether prompts and completions are given as lists of messages and not as text.
        declaration (RewardFunction | None): whose signature and attributes are the reward's, where
            ``function`` only hands its calls on: a function, or the class of an object that is
            called. None: ``function`` itself.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    chat: bool = False
    declaration: RewardFunction | None = None


def declared_call(reward: Reward) -> RewardFunction:
    """What has the signature of a call of the reward."""
    if inspect.isclass(reward.declaration):
        return partial(reward.declaration.__call__, None)  # None in the place of self
    return reward.declaration or reward.function


def bound_arguments(reward: Reward) -> frozenset[str]:
    """The keyword arguments that a config has fixed; a column of that name is not passed."""
    call = declared_call(reward)
    return frozenset(call.keywords if isinstance(call, partial) else ())


def keyword_parameters(function: Callable[..., object]) -> dict[str, bool]:
    """The parameters that a column or a config can fill by name: name -> required."""
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in _BY_KEYWORD and parameter.name not in GIVEN
    }


def takes_any_keyword(function: Callable[..., object]) -> bool:
    """Whether the function has a parameter such as ``**columns``."""
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def check_reward(reward: Reward, key: str) -> None:
    """Checks the weight, and that the function can be called the way rewards are called.

    Raises:
        ValueError: naming the ``key`` (``rewards[0]``, say), the value and the remedy.
    """
    where = f"{key} ({reward.name})"
    if isinstance(reward.weight, bool) or not isinstance(reward.weight, (int, float)):
        raise ValueError(f"{where}.weight is {reward.weight!r}; give a number.")
    if not math.isfinite(reward.weight):
        raise ValueError(f"{where}.weight is {reward.weight}; give a finite number.")
    if not callable(reward.function):
        raise ValueError(f"{where} is {reward.function!r}, which cannot be called.")
    try:
        signature = inspect.signature(declared_call(reward))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: the signature of {reward.function!r} cannot be read ({error}); wrap it in a "
            "function reward(prompts, completions, **columns)."
        ) from error
    unnamed = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    if unnamed or not takes_any_keyword(declared_call(reward)):
        problem = f"cannot be given {unnamed} by name" if unnamed else "refuses further columns"
        raise ValueError(
            f"{where} has the signature {signature} and {problem}; "
            "declare it as reward(prompts, completions, **columns)."
        )


def check_shaping(rewards: Sequence[Reward]) -> None:
    """Checks that shaping cannot pay a wrong answer as much as a right one.

    Judged are rewards that say what they are: one that ``decides`` what is right gives a right
    answer at least ``reward_gap`` (1 if it does not say) more than a wrong one; one that has a
    ``reward_range`` can favour a wrong answer by at most the width of that range.

    Raises:
        ValueError: naming the weights.
    """
    gaps = [r.weight * _said(r, "reward_gap", 1.0) for r in rewards if _said(r, "decides", False)]
    ranges = {r: _said(r, "reward_range", None) for r in rewards}
    spans = {r: abs(r.weight) * (span[1] - span[0]) for r, span in ranges.items() if span}
    if gaps and sum(spans.values()) >= sum(gaps):
        listed = ", ".join(f"{reward.name} {span:g}" for reward, span in spans.items())
        raise ValueError(
            f"rewards: together {listed} can outweigh what makes a right answer better than a "
            f"wrong one ({sum(gaps):g}); lower their weights until their sum is less."
        )


def _said(reward: Reward, attribute: str, default: Any) -> Any:
    declared = reward.declaration or reward.function
    return getattr(getattr(declared, "func", declared), attribute, default)


def check_columns(reward: Reward, columns: Iterable[str], *, data: str = "dataset") -> None:
    """Checks that the config's data set ``data`` has the columns that a reward cannot do without.

    Raises:
        ValueError: naming the missing column and those that there are.
    """
    present = sorted(columns)
    for name in present:
        if name in GIVEN:
            raise ValueError(
                f"The data set has a column {name!r}, a name that rewards get their {name} under; "
                "rename the column."
            )
    for name, required in keyword_parameters(declared_call(reward)).items():
        if required and name not in present:
            raise ValueError(
                f"The reward {reward.name!r} needs the column {name!r}, but {data} has {present}"
                f"{nearest(name, present)}. Name the column that holds it, {data}.columns="
                f"{{{name}: ...}}, or set {name} in the reward's node."
            )


def row_faults(reward: Reward, rows: Sequence[Mapping[str, Any]], *, data: str) -> dict[int, str]:
    """Asks a reward that has ``check_row`` what is wrong with each row's columns.

    Args:
        reward (Reward): whose ``check_row`` gets the values of its parameters by name, those that
            the config has fixed included, and returns a text, or None for a row that can be scored.
        rows (Sequence[Mapping[str, Any]]): n rows' columns, all of the same names.
        data (str): the data set's key in the config.

    Returns:
        Position among the rows -> what is wrong there.

    Raises:
        ValueError: if ``check_row`` needs a column that there is not.
    """
    check = _said(reward, "check_row", None)
    if check is None:
        return {}
    call = declared_call(reward)
    fixed = call.keywords if isinstance(call, partial) else {}
    given, wanted = {*rows[0], *fixed}, keyword_parameters(check)
    missing = [name for name, required in wanted.items() if required and name not in given]
    if missing:
        raise ValueError(
            f"rewards: check_row of {reward.name!r} needs {missing}, but {data} has "
            f"{sorted(rows[0])}. Its parameters are columns; under isolation: process, a class "
            "declares it as a staticmethod."
        )
    names = given if takes_any_keyword(check) else given & wanted.keys()
    faults: dict[int, str] = {}
    for position, row in enumerate(rows):
        values = {**row, **fixed}
        try:
            fault = check(**{name: values[name] for name in names})
        except Exception as error:  # as in json.loads(answer)
            fault = describe(error)
        if fault is not None:
            faults[position] = str(fault)
    return faults


def tried_rows(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> dict[int, str | None]:
    """Asks a reward that has ``check_rows``, which runs rows' content, about rows without faults.

    Returns:
        Position of each row that was tried -> what is wrong there, or None.
    """
    declared: Any = _said(reward, "check_rows", None)
    if declared is None:
        return {}
    names = keyword_parameters(declared).keys() & rows[0].keys()
    function: Any = reward.function
    return dict(function.check_rows(**{name: [row[name] for row in rows] for name in names}))


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that ``word`` was perhaps meant to be, or nothing."""
    matches = get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
