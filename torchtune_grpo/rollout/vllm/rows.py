"""A rollout's rows: a request to vLLM for each turn of a row, until all rows are over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_grpo.rollout.batch import REPORT_SECONDS
from torchtune_grpo.rollout.cache import CachedPrompt, Row
from torchtune_grpo.rollout.paused import PausedRows
from torchtune_grpo.rollout.request import Progress, RolloutRequest
from torchtune_grpo.trajectory import Samples

BROKEN = -9999.0  # what vLLM's server writes for a log-prob of NaN


class NewTokens(NamedTuple):
    """The next tokens of a request, with vLLM's log-probs of them."""

    name: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    ended: str | None  # "stop", "length", or "abort" if it is lost; None: more will come


class Requests(Protocol):
    """Requests to vLLM, by name; ``step`` returns what is new, or nothing after a moment."""

    def add(self, name: str, tokens: list[int], settings: dict[str, Any]) -> None: ...

    def step(self) -> list[NewTokens]: ...

    def abort(self, names: Sequence[str]) -> None: ...


@dataclass(eq=False)
class VLLMRow(Row):
    """A response with vLLM's log-probs of its tokens; None for those that were given."""

    response: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


class VLLMRollout:
    """One rollout by requests to vLLM.

    The next turn of a row is a new request with all of its tokens, most of whose keys and values
    are in the cache. A reply is due ``reply_steps`` steps after its turn's end, so that tokens
    alone decide which rows are computed side by side; None: whenever it comes.
    """

    def __init__(
        self, requests: Requests, request: RolloutRequest, *, reply_steps: int | None
    ) -> None:
        self._requests, self._request = requests, request
        group = request.group_size
        prompts = [CachedPrompt(tokens, rows_left=group) for tokens in request.prompts]
        self._rows = [VLLMRow(n, prompts[n // group]) for n in range(request.num_rows)]
        self._keys, self._strings = request.keys.tolist(), request.stop_strings
        self._live: dict[str, VLLMRow] = {}  # by the names of requests
        self._paused = PausedRows(request.turns)
        self._paused.steps = reply_steps
        self._steps = 0

    def run(self, must_stop: Callable[[], bool]) -> None:
        """Sample all rows, or as much of them as possible until ``must_stop()``."""
        reported = time.monotonic()
        try:
            for row in self._rows:
                self._ask(row)
            while (self._live or self._paused.rows) and not must_stop():
                if not self._go_on():
                    continue
                self._steps += 1
                for new in self._requests.step():
                    self._take(new)
                if self._request.report and time.monotonic() - reported > REPORT_SECONDS:
                    self._request.report(self._progress())
                    reported = time.monotonic()
        finally:  # whatever interrupts a rollout, the next one starts clean
            self._requests.abort([*self._live])

    def _ask(self, row: VLLMRow) -> None:
        """Request the next turn of a row, behind the reply at its end, if there is one."""
        row.logprobs += [None] * (len(row.response) - row.count)
        row.begin_turn()
        settings = {
            "temperature": self._request.params.temperature,
            "seed": (self._keys[row.number] + row.count) & (2**63 - 1),  # another for each turn
            "max_tokens": row.room(self._request),
            "stop_token_ids": [*self._request.stop_tokens],
            "ignore_eos": True,  # config.json's, which need not end a response here
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        name = f"{row.number}.{row.count}"
        self._live[name] = row
        self._requests.add(name, [*row.prompt.tokens, *row.response], settings)

    def _go_on(self) -> bool:
        """Request the turns of rows that have a reply; False if there is nothing to compute yet."""
        live = len(self._live)
        replies = self._paused.answered(now=self._steps, live=live, is_idle=not live)
        for number, reply in (replies or {}).items():
            self._paused.pop(number)
            if reply:
                self._ask(self._rows[number])
        return replies is not None and bool(self._live)

    def _take(self, new: NewTokens) -> None:
        """Add tokens to a row, up to the end of a stop string."""
        row = self._live[new.name]
        if new.ended == "abort":  # the same noise gives the same turn again
            del row.response[row.begin :], row.logprobs[row.begin :]
            row.count = row.begin
            self._ask(row)
            return
        row.response += new.tokens
        row.logprobs += new.logprobs
        row.ended = new.ended == "stop"
        turn, known = row.response[row.begin :], row.count - row.begin
        if self._strings and (end := self._strings.end(turn, start=known)):
            row.ended = True
            del row.response[row.begin + end :], row.logprobs[row.begin + end :]
        row.count = len(row.response)
        if not row.ended and not new.ended:
            return
        del self._live[new.name]
        if not new.ended:
            self._requests.abort([new.name])
        if row.ended and self._request.turns is not None:
            self._paused.add(row, now=self._steps)

    def _progress(self) -> Progress:
        begun = sum(row.count > 0 for row in self._rows)
        at_work = sum(row.count > 0 for row in self._live.values()) + len(self._paused.rows)
        tokens = sum(row.count for row in self._rows)
        return Progress(tokens, begun - at_work, at_work, len(self._rows))

    def samples(self, device: torch.device) -> Samples:
        """Return all rows, padded to the longest; there is one column at least."""
        rows = self._rows
        logprobs = _padded([[x or 0.0 for x in row.logprobs] for row in rows], torch.float32)
        if not (logprobs > BROKEN).all():
            raise ValueError(
                "rollout.engine=vllm: a log-prob is infinite or NaN: the policy broke."
            )
        sampled = _padded([[x is not None for x in row.logprobs] for row in rows], torch.bool)
        cut_off = [not row.ended or row.number in self._paused.rows for row in rows]
        is_greedy = self._request.params.temperature == 0
        return Samples(
            responses=_padded([row.response for row in rows], torch.long).to(device),
            lengths=torch.tensor([row.count for row in rows], device=device),
            truncated=torch.tensor(cut_off, device=device),
            sampled=sampled.to(device),
            sampler_logprobs=logprobs.to(device),
            behaviour_logprobs=(torch.zeros_like(logprobs) if is_greedy else logprobs).to(device),
        )


def _padded(rows: list[Any], dtype: torch.dtype) -> Tensor:
    padded = pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
    return padded if padded.shape[1] else padded.new_zeros(len(rows), 1)
