"""The conversations of a rollout: what each row's environment answers, and why each row ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from torchtune.utils import get_logger

from torchtune_grpo.config.text import describe
from torchtune_grpo.data.dataset import PromptBatch
from torchtune_grpo.environments.adapters import Reply, Turn
from torchtune_grpo.environments.calls import read_turn
from torchtune_grpo.environments.sessions import Session
from torchtune_grpo.machine import interrupt
from torchtune_grpo.machine.loop import in_thread
from torchtune_grpo.machine.parallel import gather_over_ranks
from torchtune_grpo.sandbox.remote import ObjectError, ObjectLost
from torchtune_grpo.trajectory import Completion, Prompt, Samples, message

if TYPE_CHECKING:
    from torchtune_grpo.environments.environment import Environment

log = get_logger("INFO")

# Why a conversation ends: the environment was done; a turn called no tool; at a limit on turns, on
# sampled tokens or on all tokens; a tool or step hung, died or raised; the rollout's deadline.
STOPS = ("done", "answered", "max_turns", "max_tokens", "context", "tool_failed", "deadline")
_WAIT = 0.05  # seconds; the engine looks at deadlines and interrupts in between
_LONGEST_TOKEN = 64  # characters; a text that is longer than that many tokens cannot fit


@dataclass
class _Row:
    """One conversation so far."""

    session: Session
    prompt: Prompt
    tokens: list[int]  # of the prompt
    reward: float | None  # sum over its answers; None: they come without
    messages: list[dict[str, Any]] = field(default_factory=list)
    begin: int = 0  # where the last message begins in the response, which may hold several turns
    length: int = 0  # tokens of the response when its last turn ended, and of the reply to it
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    ended: str | None = None  # one of STOPS; set at the start if the session cannot begin
    error: str | None = None  # of the user's code
    work: Future[Any] | None = None
    text: str = ""  # of its last message
    inline: list[str] = field(default_factory=list)  # replies within the policy's message
    is_closed: bool = False  # its last turn ended with a stop token
    sampled: int = 0
    shares_prompt: bool = True  # with the first row of its group


class Conversations:
    """The conversations of N = B*G rows, which reply to an engine as its ``Turns``.

    ``row_limit`` bounds the tokens of a response, ``max_sampled`` those of it that are sampled.
    ``seeds`` [B] are those of what the environments draw at random, the same for a prompt's rows.
    Sessions work side by side; what they answer is encoded in the engine's thread.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: PromptBatch,
        group_size: int,
        *,
        seeds: Sequence[int],
        max_sampled: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._environment, self._max_sampled = environment, max_sampled
        self._max_turns, self._has_failed = environment.settings.max_turns, False
        self.row_limit = environment.settings.max_response_tokens or max_sampled
        self._decode, self._stop_tokens = decode, {*environment.stop_tokens}
        self._prefill = environment.encoder.prefill
        self._done: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
        self._over: list[int] = []
        self._rows = self._begin(prompts, group_size, seeds)
        for number, row in enumerate(self._rows):
            row.shares_prompt = row.tokens == self._rows[number - number % group_size].tokens
        # One prompt for each group, unless environments say different things to its rows.
        self.group_size = group_size if all(row.shares_prompt for row in self._rows) else 1
        self.prompt_tokens = [row.tokens for row in self._rows[:: self.group_size]]

    @property
    def prompts(self) -> list[Prompt]:
        """N prompts with what ``reset`` added."""
        return [row.prompt for row in self._rows]

    # --- The beginning ---------------------------------------------------------------------------

    def _begin(self, prompts: PromptBatch, group_size: int, seeds: Sequence[int]) -> list[_Row]:
        """Reset a session for each row, all side by side, and encode what it says."""
        environment, started = self._environment, []
        for number, prompt in enumerate(prompts.prompts):
            columns = {name: values[number] for name, values in prompts.columns.items()}
            for _ in range(group_size):
                session = environment.kind_of(columns).session()
                row = environment.reset_row(columns, prompt)
                started.append((number, session, in_thread(session.reset, row, seeds[number])))
        rows = []
        for number, session, work in started:
            prompt, tokens = prompts.prompts[number], prompts.tokens[number]
            at = _Row(session, prompt, tokens, 0.0 if session.kind.adds_rewards else None)
            rows.append(at)
            if self._has_answered(at, work):
                try:
                    at.prompt, at.tokens = environment.prompt(
                        session.kind, prompt, tokens, work.result()
                    )
                    if len(at.tokens) + self.row_limit > environment.context:
                        raise ValueError("the prompt is too long")
                except Exception as error:
                    self._fail(at, describe(error))
        return rows

    # --- Turns -----------------------------------------------------------------------------------

    def end_turn(self, row: int, response: Sequence[int], *, sampled: int) -> None:
        """Have the row's environment answer the turn that has just ended."""
        at = self._rows[row]
        turn = self._note_turn(at, response, sampled)
        if at.ended is not None:
            self._over.append(row)
            return
        at.work = in_thread(at.session.answer, turn)
        at.work.add_done_callback(lambda work: self._done.put((row, work)))

    def _note_turn(self, at: _Row, response: Sequence[int], sampled: int) -> Turn:
        """Add the turn that ends a response to the row's messages, and return it."""
        at.is_closed = response[-1] in self._stop_tokens

        def text_from(begin: int) -> str:
            text = self._decode(response[begin : len(response) - at.is_closed])
            return text if begin else self._prefill + text

        text, at.text = text_from(at.length), text_from(at.begin)
        tools = at.session.kind.schemas
        parse = self._environment.parse if tools else None
        said = read_turn(at.text, parse, tools) if parse else message("assistant", at.text)
        if at.begin < at.length:  # the message goes on
            at.messages.pop()
        at.messages.append(said)
        at.turns, at.length, at.sampled = at.turns + 1, len(response), sampled
        calls = said.get("tool_calls", ())
        return Turn(text, calls, is_closed=at.is_closed, is_last=at.turns >= self._max_turns)

    def replies(self, *, wait: bool) -> Mapping[int, Sequence[int]]:
        """Return the tokens that continue each row answered since the last call; none end it."""
        found: dict[int, Sequence[int]] = {row: [] for row in self._over}
        self._over = []
        with suppress(Empty):
            while True:
                waits = wait and not found
                row, work = self._done.get(block=waits, timeout=_WAIT if waits else None)
                self._rows[row].work = None
                found[row] = self._reply(self._rows[row], work)
        return found

    def _has_answered(self, at: _Row, work: Future[Any]) -> bool:
        """Wait for a session, and tell whether it did what was asked; else its row ends."""
        while not wait_for([work], timeout=_WAIT).done:
            if interrupt.is_interrupted():  # the rollout is dropped
                at.ended = "deadline"
                return False
        error = work.exception()
        if error is not None:
            is_told = isinstance(error, (ObjectError, ObjectLost))
            at.error = f"environment {at.session.kind.name}: "
            at.error += str(error) if is_told else describe(error)
            self._fail(at, at.error)
        return error is None

    def _fail(self, at: _Row, why: str) -> None:
        """End a row that cannot go on; the first one of a rollout is logged."""
        at.ended = "tool_failed"
        if not self._has_failed:
            log.warning(f"A conversation has failed. {why}")
        self._has_failed = True

    def _reply(self, at: _Row, work: Future[Any]) -> Sequence[int]:
        """Encode what a session has answered, or say why the row ends."""
        if not self._has_answered(at, work):
            return []
        reply: Reply = work.result()
        if at.reward is not None:
            at.reward += reply.reward
        at.calls, at.failed_calls = at.calls + reply.calls, at.failed_calls + reply.failed_calls
        at.ended = reply.ended or ("max_turns" if at.turns >= self._max_turns else None)
        return [] if at.ended else self._tokens(at, reply)

    def _tokens(self, at: _Row, reply: Reply) -> Sequence[int]:
        """Add a reply to the row and encode it; none if it does not fit, which ends the row."""
        room = self.row_limit - at.length - 1
        texts = [each["content"] for each in reply.messages] + [reply.text or ""]
        fits = sum(map(len, texts)) <= _LONGEST_TOKEN * room and at.sampled < self._max_sampled
        try:
            tokens = self._environment.encode(reply, is_closed=at.is_closed) if fits else []
        except Exception as error:  # whatever the template or the tokenizer refuses
            self._fail(at, describe(error))
            return []
        if not tokens or len(tokens) > room:
            at.ended = "max_tokens" if at.sampled >= self._max_sampled else "context"
            return []
        at.length += len(tokens)
        if reply.text is None:
            at.messages += reply.messages
            at.begin = at.length
        else:
            at.inline.append(reply.text)
        return tokens

    # --- The end ---------------------------------------------------------------------------------

    def drop(self) -> None:
        """Close the sessions of a rollout that is dropped, which may be in the middle of a call."""
        for at in self._rows:
            at.session.kind.drop(at.session)

    def finish(self, samples: Samples) -> list[Completion]:
        """Return each row's conversation, with its environment's own reward."""
        for number, at in enumerate(self._rows):
            length = int(samples.lengths[number])
            if length > at.length:  # cut off within a turn
                response = samples.responses[number, :length].tolist()
                self._note_turn(at, response, int(samples.sampled[number].sum()))
            if at.ended is None:
                is_full = at.sampled >= self._max_sampled
                limit = "context" if length >= self.row_limit else "deadline"
                at.ended = "max_tokens" if is_full else limit
            if not at.messages:  # no token was sampled in time
                at.messages.append(message("assistant", self._prefill))
        self._ask_for_rewards()
        found = [self._conversation(at) for at in self._rows]
        for at in self._rows:
            kind = at.session.kind
            if at.ended == "tool_failed" or at.work is not None:
                kind.drop(at.session)
            else:
                kind.idle.append(at.session)
        return found

    def _conversation(self, at: _Row) -> Completion:
        assert at.ended is not None
        return Completion(
            at.text,
            at.messages,
            at.ended,
            kind=at.session.kind.name,
            environment=at.session.environment,
            reward=None if at.ended == "tool_failed" else at.reward,
            has_tools=bool(at.session.kind.schemas),
            turns=at.turns,
            calls=at.calls,
            failed_calls=at.failed_calls,
            error=at.error,
            shares_prompt=at.shares_prompt,
            inline=at.inline,
        )

    def _ask_for_rewards(self) -> None:
        """Ask the environments that have ``get_reward``, side by side."""
        asked = [
            (at, in_thread(at.session.reward))
            for at in self._rows
            if at.session.kind.has_reward and at.ended != "tool_failed" and at.work is None
        ]
        for at, work in asked:
            if self._has_answered(at, work):
                at.reward = work.result()


def check_failures(talks: Sequence[Completion]) -> None:
    """Raise a ValueError on all ranks if users' code has failed in all their conversations."""
    errors = [talk.error for talk in talks if talk.error is not None]
    ranks = gather_over_ranks((len(talks), len(errors), errors[:1]))
    counts, failed, first = zip(*ranks, strict=True)
    if 0 < sum(counts) == sum(failed):
        error = next(iter(chain(*first)))
        raise ValueError(f"All {sum(counts)} conversations have failed. {error}")


def conversation_metrics(completions: Sequence[Completion]) -> dict[str, list[float]]:
    """Return the metrics of conversations among completions, a value for each it applies to."""
    talks = [each for each in completions if each.kind]
    if not talks:
        return {}
    called = [each.calls for each in talks if each.has_tools]
    failed = sum(each.failed_calls for each in talks)
    return {
        **{f"environment/ended/{stop}": [each.ended == stop for each in talks] for stop in STOPS},
        "environment/turns": [float(each.turns) for each in talks],
        "environment/same_prompt": [float(each.shares_prompt) for each in talks],
        "tools/call_frequency": [float(count) for count in called],
        "tools/failure_frequency": [1.0] * failed + [0.0] * (sum(called) - failed),
    }
