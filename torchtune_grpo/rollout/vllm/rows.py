"""A rollout's rows: a request to vLLM for each turn of a row, until all rows are over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchtune_grpo.rollout.batch import REPORT_SECONDS
from torchtune_grpo.rollout.cache import CachedPrompt, Row
from torchtune_grpo.rollout.paused import PausedRows
from torchtune_grpo.rollout.request import Progress, RolloutRequest
from torchtune_grpo.rollout.vllm.process import contained
from torchtune_grpo.trajectory import Samples


@dataclass(eq=False)
class VLLMRow(Row):
    """A response with vLLM's log-probs of its tokens; None for those that were given."""

    response: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


class VLLMRollout:
    """One rollout by an ``LLMEngine`` of vLLM, in whose cache ``salt`` marks the weights.

    The next turn of a row is a new request with all of its tokens, most of whose keys and values
    are in the cache. A reply is due ``reply_steps`` steps after its turn's end, so that tokens
    alone decide which rows are computed side by side; None: whenever it comes.
    """

    def __init__(
        self, engine: Any, request: RolloutRequest, *, salt: str, reply_steps: int | None
    ) -> None:
        self._engine, self._request, self._salt = engine, request, salt
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
                with contained():
                    outputs = self._engine.step()
                self._steps += 1
                for output in outputs:
                    self._take(output)
                if self._request.report and time.monotonic() - reported > REPORT_SECONDS:
                    self._request.report(self._progress())
                    reported = time.monotonic()
        finally:  # whatever interrupts a rollout, the next one starts clean
            self._engine.abort_request([*self._live])

    def _ask(self, row: VLLMRow) -> None:
        """Request the next turn of a row, behind the reply at its end, if there is one."""
        import vllm

        params, given = self._request.params, len(row.response) - row.count
        row.logprobs += [None] * given
        row.given += given
        row.begin = row.count = len(row.response)
        left = params.max_generated_tokens - (row.count - row.given)
        settings = vllm.SamplingParams(
            temperature=params.temperature,
            seed=(self._keys[row.number] + row.count) & (2**63 - 1),  # another for each turn
            max_tokens=min(left, self._request.max_row_tokens - row.count),
            stop_token_ids=[*self._request.stop_tokens],
            ignore_eos=True,  # config.json's, which need not end a response here
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        tokens, name = [*row.prompt.tokens, *row.response], f"{row.number}.{row.count}"
        self._live[name] = row
        prompt = {"prompt_token_ids": tokens, "cache_salt": self._salt}
        self._engine.add_request(name, prompt, settings)

    def _go_on(self) -> bool:
        """Request the turns of rows that have a reply; False if there is nothing to compute yet."""
        live = len(self._live)
        replies = self._paused.answered(now=self._steps, live=live, is_idle=not live)
        for number, reply in (replies or {}).items():
            self._paused.pop(number)
            if reply:
                self._ask(self._rows[number])
        return replies is not None and bool(self._live)

    def _take(self, output: Any) -> None:
        """Add a step's tokens to a row, up to the end of a stop string."""
        name, row, new = output.request_id, self._live[output.request_id], output.outputs[0]
        row.response += new.token_ids
        pairs = zip(new.token_ids, new.logprobs, strict=True)
        row.logprobs += [entry[token].logprob for token, entry in pairs]
        row.ended = new.finish_reason == "stop"
        turn, known = row.response[row.begin :], row.count - row.begin
        if self._strings and (end := self._strings.end(turn, start=known)):
            row.ended = True
            del row.response[row.begin + end :], row.logprobs[row.begin + end :]
        row.count = len(row.response)
        if not row.ended and not output.finished:
            return
        del self._live[name]
        if not output.finished:
            self._engine.abort_request([name])
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
        if not logprobs.isfinite().all():
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
