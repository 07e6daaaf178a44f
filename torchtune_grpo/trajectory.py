"""The data that flows from the rollout to the loss, with every field's shape stated once.

B prompts, G samples in a group, N = B*G rows (prompt-major: row ``b*G + g``), T the longest
prompt + response, L the longest response.

A response token has up to four log-probs, each [N, L]; all except the behaviour's are under
``softmax(logits / temperature)``:

    sampler      as the engine reported it
    behaviour    under the distribution that the token was drawn from: the sampler's, unless
                 filters or penalties (the config's ``sampling``) changed it
    old          under the policy that sampled, the denominator of the loss's ratio: recomputed by
                 the trainer in the first optimizer step, or the sampler's (``sampling_correction``)
    reference    under the frozen policy of the KL term
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# A message as chat templates and rewards with ``format: chat`` get it.
ChatMessage = Mapping[str, Any]


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@dataclass(frozen=True)
class Prompt:
    """A prompt, of which rewards get the text or the messages."""

    text: str  # of its last message
    messages: Sequence[ChatMessage]
    is_chat: bool = False  # its row has messages, not a text

    @classmethod
    def of(cls, prompt: str | Prompt) -> Prompt:
        return prompt if isinstance(prompt, Prompt) else cls(prompt, [message("user", prompt)])

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Completion:
    """A response, prefill included, of which rewards get the text or the messages.

    What has a ``kind`` is a conversation: its text is that of the last message.
    """

    text: str
    messages: Sequence[ChatMessage]  # the assistant's, with their tool_calls, and the replies
    # stop_token, stop_string, length or deadline; of a conversation, one of its STOPS
    ended: str = ""
    kind: str = ""  # name of the environment that answered
    environment: object = None  # what rewards get as one of ``environments``
    reward: float | None = None  # the environment's own; None = it has none
    has_tools: bool = False
    turns: int = 1
    calls: int = 0  # of tools, that were made
    failed_calls: int = 0
    error: str | None = None  # of the environment's code, which has ended it
    shares_prompt: bool = True  # with the first of its group
    inline: Sequence[str] = ()  # the environment's texts within the policy's message

    @classmethod
    def of(cls, completion: str | Completion, ended: str = "") -> Completion:
        if isinstance(completion, Completion):
            return completion
        return cls(completion, [message("assistant", completion)], ended)

    @property
    def failed(self) -> bool:
        """Whether its environment did, so that no reward applies."""
        return self.ended == "tool_failed"

    def __str__(self) -> str:
        return self.text

    def __getstate__(self) -> dict[str, object]:
        """Leave out the environment, which other ranks cannot use."""
        return {**vars(self), "environment": None}


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Mark the first ``lengths[n]`` of ``width`` columns: [N] -> [N, width] bool."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True)
class Samples:
    """Sampled responses to a batch of prompts, right-padded, as an engine returns them."""

    responses: Tensor  # [N, L] token ids, undefined after a response's end
    lengths: Tensor  # [N] tokens of each response, its stop token included
    truncated: Tensor  # [N] bool, True where a limit or a deadline cut the response off
    sampled: Tensor  # [N, L] bool, True = a token that the policy sampled; False after the end
    sampler_logprobs: Tensor  # [N, L]
    behaviour_logprobs: Tensor  # [N, L]


@dataclass(frozen=True)
class Trajectory:
    """All rows of one optimizer step, from the rollout to the loss."""

    tokens: Tensor  # [N, T] token ids: each row its prompt, then its response, then padding
    prompt_indices: Tensor  # [N] the prompts' positions in the data set
    # [N] their positions among the step's prompts on all ranks; a prompt may come twice.
    step_indices: Tensor
    prompt_lengths: Tensor  # [N]
    response_lengths: Tensor  # [N] all tokens of each response
    # [N, L] bool, True = sampled by the policy, not a reply to it; False after the end
    sampled: Tensor
    response_mask: Tensor  # [N, L] bool, True = trained on: some or all of the sampled tokens
    truncated: Tensor  # [N] bool, True where a limit or a deadline cut the response off
    sampler_logprobs: Tensor  # [N, L]
    behaviour_logprobs: Tensor  # [N, L]
    prompts: list[Prompt]  # N
    completions: list[Completion]  # N
    columns: dict[str, list[object]]  # the data set's other columns, N values each
    advantages: Tensor | None = None  # [N]; None = not scored
    ref_logprobs: Tensor | None = None  # [N, L]; None = no KL term
    weights: Tensor | None = None  # [N, L] each token's share of the loss, see Loss.weights

    @property
    def num_rows(self) -> int:
        """N."""
        return self.tokens.shape[0]

    @property
    def response_ids(self) -> list[list[int]]:
        """N lists of the response's tokens, stop tokens and replies included, trained on or not."""
        rows = zip(
            self.tokens.tolist(), self.prompt_lengths.tolist(), self.response_lengths.tolist()
        )
        return [tokens[start : start + length] for tokens, start, length in rows]

    @property
    def completion_ids(self) -> list[list[int]]:
        """N lists of the tokens that the policy sampled, with stop tokens, trained on or not."""
        rows = zip(self.response_ids, self.sampled.tolist())
        return [list(compress(tokens, sampled)) for tokens, sampled in rows]

    @property
    def sampled_lengths(self) -> Tensor:
        """[N] How many tokens the policy sampled for each response."""
        return self.sampled.sum(dim=1)

    @property
    def is_informative(self) -> Tensor:
        """[N] bool, whether the rewards give a row an advantage that is not 0."""
        assert self.advantages is not None
        return self.advantages != 0

    def tensors(self) -> dict[str, Tensor]:
        """The fields that hold a tensor."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def select(self, rows: Tensor, *, on_host: Sequence[int] | None = None) -> Trajectory:
        """Select the rows with these indices [n], in this order, or those where [N] bool is True.

        ``on_host`` holds the same, for texts and columns; None asks the device and waits.
        """
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        chosen = rows.tolist() if on_host is None else on_host

        def of(values: list[Any]) -> list[Any]:
            return [values[row] for row in chosen] if values else []

        tensors: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        return replace(
            self,
            **tensors,
            prompts=of(self.prompts),
            completions=of(self.completions),
            columns={name: of(values) for name, values in self.columns.items()},
        )

    @classmethod
    def join(cls, parts: Sequence[Trajectory]) -> Trajectory:
        """Concatenate the rows of trajectories with the same fields, padded to common T and L."""
        first = parts[0]

        def padded(name: str) -> Tensor:
            values = [getattr(part, name) for part in parts]
            if values[0].dim() == 1:
                return torch.cat(values)
            width = max(value.shape[1] for value in values)
            return torch.cat([F.pad(value, (0, width - value.shape[1])) for value in values])

        def texts(lists: Iterable[list[Any]]) -> list[Any]:
            return [value for values in lists for value in values]

        tensors: dict[str, Any] = {name: padded(name) for name in first.tensors()}
        return replace(
            first,
            **tensors,
            prompts=texts(part.prompts for part in parts),
            completions=texts(part.completions for part in parts),
            columns={name: texts(p.columns[name] for p in parts) for name in first.columns},
        )


def join_rows(prompts: Sequence[Sequence[int]], samples: Samples) -> tuple[Tensor, Tensor]:
    """Put each response right after its prompt: tokens [N, T], and prompt lengths by row [N].

    With all padding (zeros) on the right, plain causal attention with default positions is exact,
    so that training needs neither a mask nor position ids.
    """
    device, group = samples.responses.device, len(samples.lengths) // len(prompts)
    repeated = [p for p in (torch.tensor(p, device=device) for p in prompts) for _ in range(group)]
    rows = zip(repeated, samples.responses, samples.lengths.tolist(), strict=True)
    joined = [torch.cat([prompt, response[:length]]) for prompt, response, length in rows]
    lengths = torch.tensor([len(prompt) for prompt in repeated], device=device)
    return pad_sequence(joined, batch_first=True), lengths
