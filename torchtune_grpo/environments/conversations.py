"""The conversations of a rollout: what each row's environment answers, and why each row ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from torchtune.utils import get_logger

from torchtune_grpo.config.text import describe
from torchtune_grpo.data.chat import Conversation, PromptText, message
from torchtune_grpo.data.dataset import PromptBatch
from torchtune_grpo.environments.calls import read_turn
from torchtune_grpo.environments.results import text_of
from torchtune_grpo.environments.sessions import Session, in_thread
from torchtune_grpo.trajectory import Samples

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
    prompt: PromptText
    tokens: list[int]  # of the prompt
    messages: list[dict[str, Any]] = field(default_factory=list)
    length: int = 0  # tokens of the response when its last turn ended, and of the reply to it
    turns: int = 0
    calls: int = 0  # that were made
    failed_calls: int = 0
    reward: float = 0.0  # sum over its steps
    ended: str | None = None  # one of STOPS; set at the start if the session cannot begin
    work: Future[Any] | None = None
    by: float = 0.0  # when the work has to be done
    text: str = ""  # of its last turn
    is_closed: bool = False  # its last turn ended with a stop token
    sampled: int = 0


class Conversations:
    """The conversations of N = B*G rows, which reply to an engine as its ``Turns``.

    ``row_limit`` bounds the tokens of a response, ``max_sampled`` those of it that are sampled.
    Sessions work side by side, each in a thread; what they answer is encoded in the engine's.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: PromptBatch,
        group_size: int,
        *,
        max_sampled: int,
        decode: Callable[[Sequence[int]], str],
        stop_tokens: Sequence[int],
        prefill: str,
    ) -> None:
        self._environment, self._max_sampled = environment, max_sampled
        self._settings, self._has_failed = environment.settings, False
        self.row_limit = environment.settings.max_response_tokens or max_sampled
        self._decode, self._stop_tokens, self._prefill = decode, {*stop_tokens}, prefill
        self._done: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
        self._over: list[int] = []
        self._rows = self._begin(prompts, group_size)
        groups = [self._rows[i : i + group_size] for i in range(0, len(self._rows), group_size)]
        is_shared = all(row.tokens == group[0].tokens for group in groups for row in group)
        # One prompt for each group, unless environments say different things to its rows.
        self.group_size = group_size if is_shared else 1
        self.prompt_tokens = [row.tokens for row in self._rows[:: self.group_size]]

    @property
    def prompts(self) -> list[PromptText]:
        """N prompts with what ``reset`` added, as rewards see them."""
        return [row.prompt for row in self._rows]

    # --- The beginning ---------------------------------------------------------------------------

    def _begin(self, prompts: PromptBatch, group_size: int) -> list[_Row]:
        """Reset a session for each row, all side by side, and encode what it says."""
        environment, started = self._environment, []
        for number, prompt in enumerate(prompts.prompts):
            columns = {name: values[number] for name, values in prompts.columns.items()}
            for _ in range(group_size):
                session = environment.kind_of(columns).session()
                work = in_thread(session.reset, environment.reset_row(columns, prompt))
                started.append((number, session, work))
        rows, end = [], self._time_limit()
        for number, session, work in started:
            prompt, tokens = prompts.prompts[number], prompts.tokens[number]
            if not isinstance(prompt, PromptText):
                prompt = environment.encoder.text(prompt)
            row = _Row(session, prompt, tokens)
            try:
                seen = _result(work, by=end)
                row.prompt, row.tokens = environment.prompt(session.kind, prompt, tokens, seen)
                if len(row.tokens) + self.row_limit > environment.context:
                    raise ValueError("the prompt is too long")
            except BaseException as error:
                self._fail(row, error)
            rows.append(row)
        return rows

    # --- Turns -----------------------------------------------------------------------------------

    def end_turn(self, row: int, response: Sequence[int], *, sampled: int) -> None:
        """Have the row's environment answer the turn that has just ended."""
        at = self._rows[row]
        text = self._note_turn(at, response, sampled)
        if at.ended is None:
            self._answer(row, at, text)
        if at.ended is not None:
            self._over.append(row)

    def _answer(self, row: int, at: _Row, text: str) -> None:
        """Let the session work on a turn, or end the row."""
        if at.session.kind.has_step:
            at.work = in_thread(at.session.step, text)
        elif calls := at.messages[-1].get("tool_calls"):
            if at.turns >= self._settings.max_turns:
                at.ended = "max_turns"
                return
            at.work = in_thread(at.session.use_tools, calls)
        else:
            at.ended = "answered"
            return
        at.by = self._time_limit()
        at.work.add_done_callback(lambda work: self._done.put((row, work)))

    def _note_turn(self, at: _Row, response: Sequence[int], sampled: int) -> str:
        """Add the turn that ends a response to the row's messages, and return its text."""
        at.is_closed = response[-1] in self._stop_tokens
        text = self._decode(response[at.length : len(response) - at.is_closed])
        at.text = text = (self._prefill if at.turns == 0 else "") + text
        kind = at.session.kind
        parse = None if kind.has_step else self._environment.parse
        turn = read_turn(text, parse, kind.schemas) if parse else message("assistant", text)
        at.messages.append(turn)
        at.turns, at.length, at.sampled = at.turns + 1, len(response), sampled
        return text

    def replies(self, *, wait: bool) -> Mapping[int, Sequence[int]]:
        """Return the tokens that continue each row answered since the last call; none end it."""
        found: dict[int, Sequence[int]] = {row: [] for row in self._over}
        self._over = []
        with suppress(Empty):
            while True:
                waits = wait and not found
                row, work = self._done.get(block=waits, timeout=_WAIT if waits else None)
                at = self._rows[row]
                if at.work is work:  # it has come in time
                    at.work = None
                    found[row] = self._reply(at, work)
        now = time.monotonic()
        for row, at in enumerate(self._rows):
            if at.work is not None and now > at.by and not at.work.done():
                at.work, found[row] = None, []
                self._fail(at, TimeoutError(f"no answer within {self._settings.timeout} s"))
        return found

    def _fail(self, at: _Row, error: BaseException) -> None:
        """End a row whose session failed; the first failure of a rollout is logged."""
        at.ended = "tool_failed"
        if not self._has_failed:
            name = at.session.kind.name
            log.warning(f"environment {name}: a conversation has failed: {describe(error)}")
        self._has_failed = True

    def _reply(self, at: _Row, work: Future[Any]) -> list[int]:
        """Encode what a session has answered, or say why the row ends."""
        settings = self._settings
        try:
            answer = work.result()
            if at.session.kind.has_step:
                seen, reward, is_done = answer
                at.reward += reward
                if is_done or at.turns >= settings.max_turns:
                    at.ended = "done" if is_done else "max_turns"
                    return []
                if settings.form == "inline" and at.is_closed:  # its message is over
                    at.ended = "answered"
                    return []
                new = seen if _are_messages(seen) else [message("user", text_of(seen or ""))]
            else:
                new = answer
                at.calls += len(new)
                at.failed_calls += sum(each.pop("failed", False) for each in new)
            room = self.row_limit - at.length - 1
            length = sum(len(each["content"]) for each in new)
            fits = length <= _LONGEST_TOKEN * room and at.sampled < self._max_sampled
            tokens = self._environment.encode(new, is_closed=at.is_closed) if fits else []
        except BaseException as error:  # whatever an environment returns or raises
            self._fail(at, error)
            return []
        if not tokens or len(tokens) > room:
            at.ended = "max_tokens" if at.sampled >= self._max_sampled else "context"
            return []
        at.messages += new
        at.length += len(tokens)
        return tokens

    def _time_limit(self) -> float:
        """Return when work that begins now has to be done; a process keeps its own time."""
        limit = math.inf if self._settings.isolation else self._settings.timeout
        return time.monotonic() + limit

    # --- The end ---------------------------------------------------------------------------------

    def finish(self, samples: Samples) -> list[Conversation]:
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
        found = [self._conversation(n, at, samples) for n, at in enumerate(self._rows)]
        self._add_rewards(found)
        for at in self._rows:
            if at.ended == "tool_failed" or at.work is not None:
                in_thread(at.session.close)
            else:
                at.session.kind.idle.append(at.session)
        return found

    def _conversation(self, number: int, at: _Row, samples: Samples) -> Conversation:
        """Return a row's conversation; in inline form, one message that holds all turns."""
        assert at.ended is not None
        text, messages = at.text, at.messages
        if self._settings.form == "inline":
            tokens = samples.responses[number, : samples.lengths[number]].tolist()
            is_closed = bool(tokens) and tokens[-1] in self._stop_tokens
            text = self._prefill + self._decode(tokens[: len(tokens) - is_closed])
            messages = [message("assistant", text)]
        conversation = Conversation(text, messages, at.ended)
        conversation.environment, conversation.kind = at.session.environment, at.session.kind.name
        conversation.turns = at.turns
        conversation.calls, conversation.failed_calls = at.calls, at.failed_calls
        conversation.has_tools = not at.session.kind.has_step
        if at.session.kind.has_step and at.ended != "tool_failed":
            conversation.reward = at.reward
        return conversation

    def _add_rewards(self, found: Sequence[Conversation]) -> None:
        """Ask the environments that have ``get_reward``, side by side."""
        asked = [
            (each, in_thread(at.session.call, "get_reward", {}))
            for each, at in zip(found, self._rows, strict=True)
            if at.session.kind.has_reward and at.ended != "tool_failed" and at.work is None
        ]
        end = self._time_limit()
        for conversation, work in asked:
            try:
                conversation.reward = _result(work, by=end)
            except BaseException as error:
                conversation.reward = error


def _result(work: Future[Any], *, by: float) -> Any:
    return work.result(timeout=None if by == math.inf else max(0.0, by - time.monotonic()))


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, Mapping) and "role" in x for x in value)


def conversation_metrics(completions: Sequence[str]) -> dict[str, list[float]]:
    """Return the metrics of conversations among completions, a value for each it applies to."""
    talks = [each for each in completions if isinstance(each, Conversation)]
    if not talks:
        return {}
    called = [each.calls for each in talks if each.has_tools]
    failed = sum(each.failed_calls for each in talks)
    return {
        **{f"environment/ended/{stop}": [each.ended == stop for each in talks] for stop in STOPS},
        "environment/turns": [float(each.turns) for each in talks],
        "tools/call_frequency": [float(count) for count in called],
        "tools/failure_frequency": [1.0] * failed + [0.0] * (sum(called) - failed),
    }
