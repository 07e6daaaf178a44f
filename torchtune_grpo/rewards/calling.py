"""Calls of rewards: lists of their own, failures one by one, and async rewards side by side."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_grpo.rewards.reward import Reward, bound_arguments
from torchtune_grpo.sandbox.contract import (
    ContractError,
    Prompt,
    RewardNotes,
    Score,
    check_returned,
    message,
)

_CLOSE_SECONDS = 5.0


@dataclass
class Outcome:
    """What one reward says about N completions."""

    scores: list[Score]  # N numbers, Nones and exceptions
    notes: RewardNotes
    raised: bool = False  # whether it gave an exception instead of scores
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
            own["prompts"] = [_messages(prompt) for prompt in own["prompts"]]
            own["completions"] = [[message("assistant", text)] for text in own["completions"]]
        else:
            own["prompts"] = [*map(str, own["prompts"])]
        if self.trainer_state is not None:
            own |= {"trainer_state": self.trainer_state, **notes.functions()}
        return own


def _messages(prompt: str) -> list[dict[str, Any]]:
    return (
        copy.deepcopy(prompt.messages) if isinstance(prompt, Prompt) else [message("user", prompt)]
    )


def is_async(reward: Reward) -> bool:
    """Whether calling the reward gives something to await."""
    method = getattr(type(reward.function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(reward.function) or inspect.iscoroutinefunction(method)


def call_reward(reward: Reward, calls: Calls) -> Outcome:
    """Calls a reward on all completions; if it raises, once more on each by itself."""
    start = time.perf_counter()
    outcome = _call(reward, calls, range(calls.count))
    if outcome.raised and calls.count > 1:
        outcome = joined([_call(reward, calls, range(r, r + 1)) for r in range(calls.count)])
    outcome.seconds = time.perf_counter() - start
    return outcome


async def _call_reward_async(reward: Reward, calls: Calls) -> Outcome:
    """As :func:`call_reward`; the calls one by one wait for each other's answers together.

    Each call is a task: a GeneratorExit that it awaits would end its caller, too.
    """
    start = time.perf_counter()
    outcome = await asyncio.create_task(_call_async(reward, calls, range(calls.count)))
    if outcome.raised and calls.count > 1:
        single = (_call_async(reward, calls, range(r, r + 1)) for r in range(calls.count))
        outcome = joined(await asyncio.gather(*single))
    outcome.seconds = time.perf_counter() - start
    return outcome


def _call(reward: Reward, calls: Calls, rows: range) -> Outcome:
    notes = RewardNotes(len(rows))
    try:
        returned = reward.function(**calls.arguments(reward, rows, notes))
        return Outcome(check_returned(returned, name=reward.name, count=len(rows)), notes)
    except (ContractError, KeyboardInterrupt):  # Ctrl-C interrupts the run
        raise
    except BaseException as error:  # sys.exit, too
        return _failed(error, notes)


async def _call_async(reward: Reward, calls: Calls, rows: range) -> Outcome:
    notes = RewardNotes(len(rows))
    try:
        returned = await reward.function(**calls.arguments(reward, rows, notes))
        return Outcome(check_returned(returned, name=reward.name, count=len(rows)), notes)
    except ContractError:
        raise
    except BaseException as error:  # no Ctrl-C reaches this thread
        return _failed(error, notes)


def _failed(error: BaseException, notes: RewardNotes) -> Outcome:
    return Outcome([error] * notes.count, notes, raised=True)


def joined(parts: Sequence[Outcome]) -> Outcome:
    """One reward's outcomes of several calls as one."""
    if len(parts) == 1:
        return parts[0]
    notes = RewardNotes(sum(part.notes.count for part in parts))
    first = 0
    for part in parts:
        for name, values in part.notes.extra.items():
            column = notes.extra.setdefault(name, [None] * notes.count)
            column[first : first + part.notes.count] = values
        notes.metrics += part.notes.metrics
        first += part.notes.count
    scores = [score for part in parts for score in part.scores]
    return Outcome(scores, notes, seconds=sum(part.seconds for part in parts))


class AsyncRewards:
    """An event loop in a thread of its own, so that it does not matter whether one already runs.

    It lives as long as its rewards, which may keep connections open from step to step.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Runs the loop, again after a task of a reward has stopped it by sys.exit, say."""
        while not (self._closing or self._loop.is_closed()):
            with contextlib.suppress(BaseException):
                self._loop.run_forever()

    def is_alive(self) -> bool:
        """Whether it can be used; not after a fork, or when a reward has closed the loop."""
        return self._thread.is_alive()

    def start(self, reward: Reward, calls: Calls) -> Callable[[], Outcome]:
        """Starts a reward's calls. Returns a function that waits for their outcome."""
        answer = _call_reward_async(reward, calls)
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)

        def outcome() -> Outcome:
            while not concurrent.futures.wait([future], timeout=1.0).done:
                if not self.is_alive():
                    lost = RuntimeError("its event loop has ended")
                    return _failed(lost, RewardNotes(calls.count))
            try:
                return future.result()
            except concurrent.futures.CancelledError as error:  # a reward cancelled all tasks
                return _failed(error, RewardNotes(calls.count))

        return outcome

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():  # a reward may hang in it
            self._loop.close()
