"""What a rollout has sampled so far, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_grpo.rollout._layout import RowLayout
from torchtune_grpo.rollout._noise import uniforms
from torchtune_grpo.rollout._params import SamplingParams
from torchtune_grpo.rollout._sampling import Sampler


class Transcript:
    """Samples tokens and keeps them: N rows, and one more that is nobody's.

    Args:
        params (SamplingParams): how to sample.
        stop_tokens (Sequence[int]): a response ends with the first of these.
        keys (Tensor): [N] of the noise.
        places (int): most rows of a step.

    Attributes:
        tokens (Tensor): [N + 1, max_generated_tokens].
        logprobs (Tensor): the same shape; plain ones.
        drawn_logprobs (Tensor): the same shape; of the distribution that was drawn from.
        ended (Tensor): [N + 1] the length up to the first stop token, 0 without one.
    """

    def __init__(
        self, params: SamplingParams, *, stop_tokens: Sequence[int], keys: Tensor, places: int
    ) -> None:
        shape, device = (len(keys) + 1, params.max_generated_tokens), keys.device
        self._sampler = Sampler(params, stop_tokens=stop_tokens, device=device)
        self._noise = uniforms(torch.cat([keys, keys[:1]]), shape[1])
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.drawn_logprobs = torch.zeros(shape, device=device)
        self.ended = torch.zeros(shape[0], dtype=torch.long, device=device)
        self._places = places
        self._seen: Tensor | None = None  # [places, V], for the repetition penalty

    def begin(self, prompts: list[Tensor], *, places: Tensor, vocab: int) -> None:
        """Takes note of the prompts of the rows that begin in some places."""
        if self._sampler.params.repetition_penalty == 1:
            return
        if self._seen is None:
            shape = (self._places, vocab)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=places.device)
        for place, prompt in zip(places.tolist(), prompts, strict=True):
            self._seen[place] = False
            self._seen[place, prompt] = True

    def move(self, *, source: int, target: int) -> None:
        """A row goes to another place."""
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def sample(self, logits: Tensor, at: RowLayout, places: Tensor | slice) -> None:
        """Samples the next token of the rows in some places, and counts it in the layout."""
        rows, counts = at.rows[places], at.counts[places]
        tokens, logprobs, drawn = self._sampler(
            logits,
            uniforms=self._noise[rows, counts],
            counts=counts,
            seen=None if self._seen is None else self._seen[places],
        )
        self.tokens[rows, counts] = tokens
        self.logprobs[rows, counts] = logprobs
        self.drawn_logprobs[rows, counts] = drawn
        if self._seen is not None:
            place = torch.arange(len(self._seen), device=tokens.device)[places]
            self._seen[place, tokens] = torch.ones_like(tokens, dtype=torch.bool)
        stopped = self._sampler.is_stop(tokens) & (self.ended[rows] == 0)
        self.ended[rows] = torch.where(stopped, counts + 1, self.ended[rows])
        at.counts[places] += at.is_live[places]
