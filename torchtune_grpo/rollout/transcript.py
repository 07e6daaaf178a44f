"""What a rollout has sampled so far, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_grpo.rollout.buffers import Buffers
from torchtune_grpo.rollout.noise import uniforms
from torchtune_grpo.rollout.request import RolloutRequest
from torchtune_grpo.rollout.sampling import Sampler
from torchtune_grpo.rollout.stop_strings import StopStrings
from torchtune_grpo.trajectory import Samples


class Transcript:
    """Samples tokens and keeps them: N rows, and one more that is nobody's.

    Args:
        request (RolloutRequest): N rows.
        places (int): most rows of a step.
        vocab (int): V.
        buffers (Buffers): where all of it lies.

    Attributes:
        tokens (Tensor): [N + 1, max_generated_tokens].
    """

    def __init__(
        self, request: RolloutRequest, *, places: int, vocab: int, buffers: Buffers
    ) -> None:
        params, keys = request.params, request.keys.to(buffers.device)
        shape = (len(keys) + 1, params.max_generated_tokens)
        self._params = params
        stops = tuple(request.stop_tokens)
        self._sampler = buffers.keep(
            (params, stops),
            lambda: Sampler(params, stop_tokens=stops, device=buffers.device),
        )
        self._stops = frozenset(stops)
        self._stop_strings = None
        if params.stop_strings and request.decode is not None:
            self._stop_strings = StopStrings(params.stop_strings, decode=request.decode)
        self._noise = buffers.take("noise", shape, dtype=torch.float64)
        self._noise.copy_(uniforms(torch.cat([keys, keys[:1]]), shape[1]))
        self.tokens = buffers.take("tokens", shape, dtype=torch.long)
        # Of the sampler and, where that is another one, of the behaviour policy.
        kinds = 2 if params.filters or params.changes_logits or params.temperature == 0 else 1
        self._logprobs = [
            buffers.take(f"log-probs {kind}", shape, dtype=torch.float32).zero_()
            for kind in range(kinds)
        ]
        self._seen: Tensor | None = None  # [places, V]
        if params.repetition_penalty != 1:
            self._seen = buffers.take("seen", (places, vocab), dtype=torch.bool)

    def begin(self, prompts: Sequence[Sequence[int]], *, places: Sequence[int]) -> None:
        """Takes note of the prompts of the rows that begin in some places."""
        if self._seen is not None:
            for place, prompt in zip(places, prompts, strict=True):
                self._seen[place] = False
                self._seen[place, list(prompt)] = True

    def move(self, *, source: int, target: int) -> None:
        """A row goes to another place."""
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def sample(
        self, logits: Tensor, *, rows: Tensor, last: Tensor | None, places: Tensor | slice
    ) -> None:
        """Samples the next token of some rows, without a look at the device.

        Args:
            logits (Tensor): [n, V].
            rows (Tensor): [n] their numbers.
            last (Tensor | None): [n] the place of each one's last token; None = it has none yet.
            places (Tensor | slice): where they are among the rows of a step.
        """
        if last is None:
            at, ahead, counts = (rows, torch.zeros_like(rows)), 0, torch.zeros_like(rows)
        else:
            at, ahead, counts = (rows, last), 1, last + 1 if self._params.min_new_tokens else last
        tokens, *logprobs = self._sampler(
            logits,
            uniforms=self._noise[:, ahead:][at],
            counts=counts,
            seen=None if self._seen is None else self._seen[places],
        )
        self.tokens[:, ahead:][at] = tokens
        for kept, new in zip(self._logprobs, logprobs, strict=False):
            kept[:, ahead:][at] = new
        if self._seen is not None:
            place = torch.arange(len(self._seen), device=tokens.device)[places]
            self._seen[place, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def ends(self, rows: Tensor, *, counts: Sequence[int], unseen: int) -> list[int]:
        """The lengths at which rows [n] have ended, 0 for those that have not.

        Args:
            rows (Tensor): [n] their numbers.
            counts (Sequence[int]): their n numbers of sampled tokens, at least 1.
            unseen (int): how many of the last tokens have not been looked at.
        """
        starts = [max(count - unseen, 0) for count in counts]
        ends = []
        if self._stop_strings is None:
            columns = torch.tensor(starts)[:, None] + torch.arange(min(unseen, max(counts)))
            columns = columns.to(rows.device).clamp_(max=self.tokens.shape[1] - 1)
            new = self.tokens[rows[:, None], columns].tolist()
        else:
            whole = self.tokens[rows].tolist()
            new = [tokens[start:] for tokens, start in zip(whole, starts, strict=True)]
        for index, (tokens, start, count) in enumerate(zip(new, starts, counts, strict=True)):
            hits = (at for at, token in enumerate(tokens[: count - start]) if token in self._stops)
            end = start + next(hits, -start - 1) + 1
            if self._stop_strings is not None:
                begin = max(start, self._params.min_new_tokens - 1)
                length = end or count
                end = self._stop_strings.end(whole[index][:length], start=begin) or end
            ends.append(end)
        return ends

    def spoilt(self, rows: Sequence[int]) -> list[bool]:
        """Which rows have a log-prob that is not finite."""
        if not rows:  # mostly so: no look at the device
            return []
        index = torch.tensor(rows, dtype=torch.long, device=self.tokens.device)
        logprobs = self._logprobs[0][index]
        return (~logprobs.isfinite()).any(dim=1).tolist()

    def samples(self, *, lengths: list[int], truncated: list[bool], first: int = 0) -> Samples:
        """The n rows from the ``first`` one on, cut to their lengths."""
        sampled = slice(first, first + len(lengths)), slice(max(1, *lengths))  # [n, L]
        logprobs = [kept[sampled].clone() for kept in self._logprobs]
        return Samples(
            responses=self.tokens[sampled].clone(),
            lengths=torch.tensor(lengths, device=self.tokens.device),
            truncated=torch.tensor(truncated, device=self.tokens.device),
            sampler_logprobs=logprobs[0],
            behaviour_logprobs=logprobs[-1],
        )
