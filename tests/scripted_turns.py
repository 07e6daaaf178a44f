"""Replies that depend on a row and its response alone, whenever they come."""

import random
from dataclasses import replace

from torchtune_grpo.rollout.request import RolloutRequest

STOPS = (7, 11, 30, 44, 52)
MAX_TURNS = 4


def reply_to(row: int, response: list[int], turn: int) -> list[int]:
    """Reply with up to 6 tokens, stop tokens and stop strings among them; at times with none."""
    chance = random.Random(f"{row} {turn} {response}")
    length = chance.choice([0, 1, 1, 3, 6])
    return [chance.choice([*STOPS, 9, 13, 21]) for _ in range(length)]


class Scripted:
    """Replies in the order and after the number of looks that ``late`` gives for a turn."""

    def __init__(self, late=lambda row, turn: 0) -> None:
        self.limits = None  # tokens that are sampled, and of a response
        self.asked: list[tuple] = []
        self._late, self._pending, self.waits = late, [], 0

    def end_turn(self, row, response, *, sampled) -> None:
        turn = sum(asked[0] == row for asked in self.asked)
        self.asked.append((row, list(response), sampled))
        reply = limited_reply(row, list(response), turn, sampled, self.limits)
        self._pending.append([self._late(row, turn), row, reply])

    def replies(self, *, wait):
        self.waits += wait
        ready = [each for each in self._pending if each[0] <= 0]
        self._pending = [[looks - 1, *more] for looks, *more in self._pending if looks > 0]
        return {row: reply for _, row, reply in reversed(ready)}


def limited_reply(row, response, turn, sampled, limits) -> list[int]:
    reply = reply_to(row, response, turn)
    fits = sampled < limits[0] and len(response) + len(reply) < limits[1]
    return reply if fits and turn < MAX_TURNS - 1 else []


def with_turns(asked: RolloutRequest, turns: Scripted) -> RolloutRequest:
    turns.limits = asked.params.max_generated_tokens, asked.max_row_tokens
    return replace(asked, turns=turns)


LATE = {
    "at_once": lambda row, turn: 0,
    "late": lambda row, turn: 5 * (row % 3) + turn,
    "last_first": lambda row, turn: 2 * (12 - row),
    "much_later": lambda row, turn: 40,
}
