"""Calls of rewards: lists of their own, failures one by one, and async rewards side by side."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_grpo.reward_contract import ContractError, RewardNotes, Score, check_returned
from torchtune_grpo.rewards._reward import Reward, bound_arguments


@dataclass
class Outcome:
    """What one reward says about N completions.

    Args:
        scores (list[Score]): N numbers, Nones and exceptions.
        notes (RewardNotes): what it reported besides.
        raised (bool): whether it gave an exception instead of scores.
        seconds (float): how long it took.
    """

    scores: list[Score]
    notes: RewardNotes
    raised: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Calls:
    """The arguments of a step's calls: N values each, and how far the run is; None = not given."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    completion_ids: Sequence[Sequence[int]] | None
    trainer_state: Any

    @property
    def count(self) -> int:
        """N."""
        return len(self.completions)

    def arguments(self, reward: Reward, rows: range, notes: RewardNotes) -> dict[str, Any]:
        """Lists of the call's own, so that a reward which changes them changes no other's."""
        bound = bound_arguments(reward)
        given = {name: values for name, values in self.columns.items() if name not in bound}
        given |= {"prompts": self.prompts, "completions": self.completions}
        own: dict[str, Any] = {n: [values[row] for row in rows] for n, values in given.items()}
        if self.completion_ids is not None:
            own["completion_ids"] = [list(self.completion_ids[row]) for row in rows]
        if reward.chat:
            own["prompts"] = [_message("user", text) for text in own["prompts"]]
            own["completions"] = [_message("assistant", text) for text in own["completions"]]
        if self.trainer_state is not None:
            own |= {"trainer_state": self.trainer_state, **notes.functions()}
        return own


def _message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def is_async(reward: Reward) -> bool:
    """Whether calling the reward gives something to await."""
    method = getattr(type(reward.function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(reward.function) or inspect.iscoroutinefunction(method)


def call_reward(reward: Reward, calls: Calls) -> Outcome:
    """Calls a reward on all completions; if it raises, once more on each by itself."""
    start = time.perf_counter()
    outcome = _call(reward, calls, range(calls.count))
    if outcome.raised and calls.count > 1:
        outcome = _joined([_call(reward, calls, range(r, r + 1)) for r in range(calls.count)])
    outcome.seconds = time.perf_counter() - start
    return outcome


async def _call_reward_async(reward: Reward, calls: Calls) -> Outcome:
    """As :func:`call_reward`; the calls one by one wait for each other's answers together."""
    start = time.perf_counter()
    outcome = await _call_async(reward, calls, range(calls.count))
    if outcome.raised and calls.count > 1:
        single = (_call_async(reward, calls, range(r, r + 1)) for r in range(calls.count))
        outcome = _joined(await asyncio.gather(*single))
    outcome.seconds = time.perf_counter() - start
    return outcome


def _call(reward: Reward, calls: Calls, rows: range) -> Outcome:
    notes = RewardNotes(len(rows))
    try:
        returned = reward.function(**calls.arguments(reward, rows, notes))
        return Outcome(check_returned(returned, name=reward.name, count=len(rows)), notes)
    except ContractError:
        raise
    except Exception as error:
        return Outcome([error] * len(rows), notes, raised=True)


async def _call_async(reward: Reward, calls: Calls, rows: range) -> Outcome:
    notes = RewardNotes(len(rows))
    try:
        returned = await reward.function(**calls.arguments(reward, rows, notes))
        return Outcome(check_returned(returned, name=reward.name, count=len(rows)), notes)
    except ContractError:
        raise
    except Exception as error:
        return Outcome([error] * len(rows), notes, raised=True)


def _joined(parts: Sequence[Outcome]) -> Outcome:
    """One outcome of calls on one completion each."""
    notes = RewardNotes(len(parts))
    for row, part in enumerate(parts):
        for name, (value,) in part.notes.extra.items():
            notes.extra.setdefault(name, [None] * len(parts))[row] = value
        notes.metrics += part.notes.metrics
    return Outcome([score for part in parts for score in part.scores], notes)


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
            return await asyncio.gather(*(_call_reward_async(r, calls) for r in rewards))

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
