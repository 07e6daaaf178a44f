"""What a rollout has sampled so far, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_grpo.rollout._noise import uniforms
from torchtune_grpo.rollout._request import RolloutRequest
from torchtune_grpo.rollout._sampling import Sampler
from torchtune_grpo.rollout._stop_strings import StopStrings
from torchtune_grpo.trajectory import Samples


class Transcript:
    """Samples tokens and keeps them: N rows, and one more that is nobody's.

    Args:
        request (RolloutRequest): N rows.
        places (int): most rows of a step.
        device (torch.device): of the logits.

    Attributes:
        tokens (Tensor): [N + 1, max_generated_tokens].
        sampler_logprobs (Tensor): the same shape.
        behaviour_logprobs (Tensor): the same shape.
    """

    def __init__(self, request: RolloutRequest, *, places: int, device: torch.device) -> None:
        params, keys = request.params, request.keys.to(device)
        shape = (len(keys) + 1, params.max_generated_tokens)
        self._params = params
        self._sampler = Sampler(params, stop_tokens=request.stop_tokens, device=device)
        self._stop_strings = None
        if params.stop_strings and request.decode is not None:
            self._stop_strings = StopStrings(params.stop_strings, decode=request.decode)
        self._noise = uniforms(torch.cat([keys, keys[:1]]), shape[1])
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.sampler_logprobs = torch.zeros(shape, device=device)
        self.behaviour_logprobs = torch.zeros(shape, device=device)
        self._stopped = torch.zeros(shape[0], dtype=torch.long, device=device)  # 0 = not yet
        self._places = places
        self._seen: Tensor | None = None  # [places, V], for the repetition penalty

    def begin(self, prompts: Sequence[Sequence[int]], *, places: list[int], vocab: int) -> None:
        """Takes note of the prompts of the rows that begin in some places."""
        if self._params.repetition_penalty == 1:
            return
        if self._seen is None:
            shape = (self._places, vocab)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self.tokens.device)
        for place, prompt in zip(places, prompts, strict=True):
            self._seen[place] = False
            self._seen[place, list(prompt)] = True

    def move(self, *, source: int, target: int) -> None:
        """A row goes to another place."""
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def sample(
        self, logits: Tensor, *, rows: Tensor, counts: Tensor, places: Tensor | slice
    ) -> None:
        """Samples the next token of some rows, without a look at the device.

        Args:
            logits (Tensor): [n, V].
            rows (Tensor): [n] their numbers.
            counts (Tensor): [n] their sampled tokens so far.
            places (Tensor | slice): where they are among the rows of a step.
        """
        tokens, sampler_logprobs, behaviour_logprobs = self._sampler(
            logits,
            uniforms=self._noise[rows, counts],
            counts=counts,
            seen=None if self._seen is None else self._seen[places],
        )
        self.tokens[rows, counts] = tokens
        self.sampler_logprobs[rows, counts] = sampler_logprobs
        self.behaviour_logprobs[rows, counts] = behaviour_logprobs
        if self._seen is not None:
            place = torch.arange(len(self._seen), device=tokens.device)[places]
            self._seen[place, tokens] = torch.ones_like(tokens, dtype=torch.bool)
        stopped = self._sampler.is_stop(tokens) & (self._stopped[rows] == 0)
        self._stopped[rows] = torch.where(stopped, counts + 1, self._stopped[rows])

    def ends(self, rows: Tensor, *, counts: list[int], unseen: int) -> list[int]:
        """The lengths at which rows [n] have ended, 0 for those that have not.

        Args:
            rows (Tensor): [n] their numbers.
            counts (list[int]): their n numbers of sampled tokens.
            unseen (int): how many of the last tokens have not been searched for stop strings.
        """
        ends = self._stopped[rows].tolist()
        if self._stop_strings is None:
            return ends
        for index, (tokens, count) in enumerate(zip(self.tokens[rows].tolist(), counts)):
            length = ends[index] or count
            start = max(length - unseen, self._params.min_new_tokens - 1, 0)
            ends[index] = self._stop_strings.end(tokens[:length], start=start) or ends[index]
        return ends

    def samples(self, *, lengths: list[int], truncated: list[bool]) -> Samples:
        """All N rows, cut to their lengths."""
        sampled = slice(len(lengths)), slice(max(1, *lengths))  # [N, L]
        return Samples(
            responses=self.tokens[sampled],
            lengths=torch.tensor(lengths, device=self.tokens.device),
            truncated=torch.tensor(truncated, device=self.tokens.device),
            sampler_logprobs=self.sampler_logprobs[sampled],
            behaviour_logprobs=self.behaviour_logprobs[sampled],
        )
