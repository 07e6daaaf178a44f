"""The data that flows from the rollout to the loss, with every field's shape stated once.

B prompts, G samples in a group, N = B*G rows (prompt-major: row ``b*G + g``), T the longest
prompt + response, L the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Marks the first ``lengths[n]`` of ``width`` columns.

    Args:
        lengths (Tensor): [N] integers.
        width (int): number of columns.

    Returns:
        Tensor: [N, width] bool.
    """
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass
class Samples:
    """What an engine returns for a batch of prompts: the sampled responses, right-padded.

    Attributes:
        responses (Tensor): [N, L] token ids; what stands behind a response's end is undefined.
        lengths (Tensor): [N] number of tokens of each response, its stop token included.
        truncated (Tensor): [N] bool, True where no stop token came in time.
        logprobs (Tensor): [N, L] log-prob of each sampled token under ``logits / temperature``.
        drawn_logprobs (Tensor): [N, L] its log-prob under the distribution that it was drawn from:
            the same without filters and penalties, else that of what they left.
    """

    responses: Tensor
    lengths: Tensor
    truncated: Tensor
    logprobs: Tensor
    drawn_logprobs: Tensor


def cat_samples(parts: Sequence[Samples]) -> Samples:
    """Stacks the rows of several samples, padding each tensor to the widest."""
    width = max(part.responses.shape[1] for part in parts)
    return Samples(
        **{
            name: torch.cat(
                [
                    F.pad(value, (0, width - value.shape[1])) if value.dim() > 1 else value
                    for value in (getattr(part, name) for part in parts)
                ]
            )
            for name in vars(parts[0])
        }
    )


@dataclass
class Trajectory:
    """All rows of one optimizer step, from the rollout to the loss.

    Attributes:
        tokens (Tensor): [N, T] token ids: each row its prompt, then its response, then padding.
        prompt_lengths (Tensor): [N].
        response_mask (Tensor): [N, L] bool, True = this response token is trained on.
        truncated (Tensor): [N] bool, True where no stop token came in time.
        sampler_logprobs (Tensor): [N, L] what the sampler reported for its own tokens.
        prompts (list[str]): N texts, as rewards see them.
        completions (list[str]): N texts, prefill included, as rewards see them.
        columns (dict[str, list]): the data set's other columns, N values each.
        drawn_logprobs (Tensor | None): [N, L] the same under the distribution that filters and
            penalties left; None = there were none.
        advantages (Tensor | None): [N], once scored.
        old_logprobs (Tensor | None): [N, L] under the policy that sampled; None = identical to
            the current policy, as in the only optimizer step on fresh samples.
        ref_logprobs (Tensor | None): [N, L] under the reference policy; None = no KL term.
        weights (Tensor | None): [N, L] each token's share of the loss; they carry the
            denominator of the whole step, so that micro-batches simply add up.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    response_mask: Tensor
    truncated: Tensor
    sampler_logprobs: Tensor
    prompts: list[str]
    completions: list[str]
    columns: dict[str, list[Any]]
    drawn_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.tokens.shape[0]

    @property
    def response_lengths(self) -> Tensor:
        """[N] number of trained tokens per row."""
        return self.response_mask.sum(dim=1)

    @property
    def behaviour_logprobs(self) -> Tensor:
        """[N, L] under the distribution that the tokens were drawn from."""
        return self.sampler_logprobs if self.drawn_logprobs is None else self.drawn_logprobs

    @property
    def completion_ids(self) -> list[list[int]]:
        """N lists of the tokens that were sampled, stop tokens included."""
        rows = zip(
            self.tokens.tolist(), self.prompt_lengths.tolist(), self.response_lengths.tolist()
        )
        return [tokens[start : start + length] for tokens, start, length in rows]

    def tensors(self) -> dict[str, Any]:
        """The fields that are tensors and are there."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Trajectory:
        """The same trajectory on another device."""
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})

    def select(self, rows: Tensor) -> Trajectory:
        """The tensors of some rows [n], in that order, without the texts."""
        tensors = {name: value[rows] for name, value in self.tensors().items()}
        return replace(self, **tensors, prompts=[], completions=[], columns={})


def join_rows(
    *, prompt_tokens: Tensor, prompt_lengths: Tensor, samples: Samples
) -> tuple[Tensor, Tensor]:
    """Puts each response right behind its prompt, without padding between them.

    Without a gap and with all padding on the right, plain causal attention with default positions
    is exact, so that neither a mask nor position ids are needed in training.

    Args:
        prompt_tokens (Tensor): [B, P] left-padded.
        prompt_lengths (Tensor): [B].
        samples (Samples): N = B*G rows.

    Returns:
        tuple[Tensor, Tensor]: tokens [N, T], zero behind each row's end, and lengths of the
        prompts by row [N].
    """
    group = samples.lengths.shape[0] // prompt_lengths.shape[0]
    prompt_lengths = prompt_lengths.repeat_interleave(group)  # [N]
    width = prompt_tokens.shape[1]
    rows = torch.cat([prompt_tokens.repeat_interleave(group, dim=0), samples.responses], dim=1)
    total = int((prompt_lengths + samples.lengths).max())
    shift = (width - prompt_lengths)[:, None]  # [N, 1] the left padding to take away
    source = torch.arange(total, device=rows.device) + shift  # [N, T]
    tokens = rows.gather(1, source.clamp(max=rows.shape[1] - 1))
    return tokens.where(length_mask(prompt_lengths + samples.lengths, total), 0), prompt_lengths
