"""Calls of rewards: lists of their own, failures one by one, and async rewards side by side."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtune_grpo.reward_contract import ContractError, RewardNotes, Score, check_returned
from torchtune_grpo.rewards._reward import Reward, bound_arguments

_PER_COMPLETION = ("prompts", "completions", "completion_ids")


@dataclass
class Outcome:
    """What one reward says about N completions.

    Args:
        scores (list[Score]): N numbers, Nones and exceptions.
        seconds (float): how long it took.
        notes (RewardNotes): what it reported besides.
    """

    scores: list[Score] = field(default_factory=list)
    seconds: float = 0.0
    notes: RewardNotes = field(default_factory=lambda: RewardNotes(0))


class Calls:
    """The arguments of a step's calls.

    Args:
        prompts (Sequence[str]): N texts.
        completions (Sequence[str]): N texts.
        columns (Mapping[str, Sequence[Any]]): N values each.
        completion_ids (Sequence[Sequence[int]] | None): N lists of tokens; None = not given.
        trainer_state (Any): given to rewards as it is; None = not given.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None,
        trainer_state: Any,
    ) -> None:
        self._rows: dict[str, Sequence[Any]] = {
            **columns,
            "prompts": prompts,
            "completions": completions,
        }
        if completion_ids is not None:
            self._rows["completion_ids"] = completion_ids
        self._state = {} if trainer_state is None else {"trainer_state": trainer_state}
        self.count = len(completions)

    def arguments(self, reward: Reward, rows: range, notes: RewardNotes) -> dict[str, Any]:
        """Lists of the call's own, so that a reward which changes them changes no other's."""
        bound = bound_arguments(reward.function)
        own = {
            name: [values[row] for row in rows]
            for name, values in self._rows.items()
            if name in _PER_COMPLETION or name not in bound
        }
        if "completion_ids" in own:
            own["completion_ids"] = [list(tokens) for tokens in own["completion_ids"]]
        if reward.chat:
            own["prompts"] = [_message("user", text) for text in own["prompts"]]
            own["completions"] = [_message("assistant", text) for text in own["completions"]]
        return {**own, **self._state, **(notes.functions() if self._state else {})}


def _message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def is_async(reward: Reward) -> bool:
    """Whether calling the reward gives something to await."""
    method = getattr(type(reward.function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(reward.function) or inspect.iscoroutinefunction(method)


def call_reward(reward: Reward, calls: Calls) -> Outcome:
    """Calls a reward on all completions; if it raises, once more on each by itself."""
    start = time.perf_counter()
    outcome = Outcome(notes=RewardNotes(calls.count))
    try:
        rows = range(calls.count)
        returned = reward.function(**calls.arguments(reward, rows, outcome.notes))
        outcome.scores = check_returned(returned, name=reward.name, count=calls.count)
    except ContractError:
        raise
    except Exception as error:
        outcome.scores = [error] if calls.count == 1 else _one_by_one(reward, calls, outcome)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _one_by_one(reward: Reward, calls: Calls, outcome: Outcome) -> list[Score]:
    scores: list[Score] = []
    outcome.notes = RewardNotes(calls.count)  # what a call that raised reported does not count
    for row in range(calls.count):
        notes = RewardNotes(1)
        try:
            returned = reward.function(**calls.arguments(reward, range(row, row + 1), notes))
            scores += check_returned(returned, name=reward.name, count=1)
        except ContractError:
            raise
        except Exception as error:
            scores.append(error)
        _merge(outcome.notes, notes, row, calls.count)
    return scores


def _merge(whole: RewardNotes, part: RewardNotes, row: int, count: int) -> None:
    for name, (value,) in part.extra.items():
        whole.extra.setdefault(name, [None] * count)[row] = value
    whole.metrics += part.metrics


async def _call_async(reward: Reward, calls: Calls) -> Outcome:
    """As :func:`call_reward`; the calls one by one wait for each other's answers together."""
    start = time.perf_counter()
    outcome = Outcome(notes=RewardNotes(calls.count))
    try:
        rows = range(calls.count)
        returned = await reward.function(**calls.arguments(reward, rows, outcome.notes))
        outcome.scores = check_returned(returned, name=reward.name, count=calls.count)
    except ContractError:
        raise
    except Exception as error:
        if calls.count == 1:
            outcome.scores = [error]
        else:
            outcome.notes = RewardNotes(calls.count)
            single = (_call_async_on(reward, calls, row, outcome) for row in range(calls.count))
            outcome.scores = list(await asyncio.gather(*single))
    outcome.seconds = time.perf_counter() - start
    return outcome


async def _call_async_on(reward: Reward, calls: Calls, row: int, outcome: Outcome) -> Score:
    notes = RewardNotes(1)
    try:
        returned = await reward.function(**calls.arguments(reward, range(row, row + 1), notes))
        (score,) = check_returned(returned, name=reward.name, count=1)
    except ContractError:
        raise
    except Exception as error:
        score = error
    _merge(outcome.notes, notes, row, calls.count)
    return score


class AsyncRewards:
    """An event loop in a thread of its own, so that it does not matter whether one already runs.

    It lives as long as its rewards, which may keep connections open from step to step.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, rewards: Sequence[Reward], calls: Calls) -> Any:
        """Starts all rewards' calls. Returns a future of their outcomes, in order."""

        async def run() -> list[Outcome]:
            running: list[Awaitable[Outcome]] = [_call_async(reward, calls) for reward in rewards]
            return list(await asyncio.gather(*running))

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
