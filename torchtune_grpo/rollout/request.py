"""The request to an engine, and how its samples become rows to score and train on."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.machine import interrupt
from torchtune_grpo.rollout.sampling import row_keys
from torchtune_grpo.trajectory import Samples, Trajectory, join_rows, length_mask

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Progress:
    """The progress of a rollout: tokens sampled so far, and its rows."""

    tokens: int
    finished: int
    live: int
    rows: int

    def __str__(self) -> str:
        return f"{self.finished}/{self.rows}, {tqdm.format_sizeof(self.tokens)} tokens"


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A request for a group of responses to each prompt: N = B*G rows, prompt-major.

    ``keys`` [N] int64 seed the rows' noise, see :func:`row_keys`: a response depends on its prompt,
    its key and the policy, and on nothing else. ``decode`` turns token ids into text, and is needed
    for ``params.stop_strings``. ``report`` is called with the progress now and then.
    """

    prompts: Sequence[Sequence[int]]  # none of them empty
    group_size: int
    params: SamplingParams
    stop_tokens: Sequence[int]
    keys: Tensor
    decode: Decode | None = None
    report: Callable[[Progress], None] | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.prompts) * self.group_size


class RolloutEngine(Protocol):
    """Samples a group of responses for each prompt."""

    def generate(self, request: RolloutRequest) -> Samples:
        """Sample all rows of a request with the policy's current weights."""
        ...


def must_stop(deadline: float | None) -> Callable[[], bool]:
    """Return a function that tells between tokens if a deadline or an interrupt ends a rollout.

    ``deadline`` is in seconds from now.
    """
    end = math.inf if deadline is None else time.monotonic() + deadline
    return lambda: time.monotonic() > end or interrupt.is_interrupted()


def roll_out(
    engine: RolloutEngine,
    prompts: PromptBatch,
    *,
    tokenizer: Any,
    group_size: int,
    params: SamplingParams,
    prefill: str,
    seed: int,
    step: int,
    report: Callable[[Progress], None] | None = None,
) -> Trajectory:
    """Sample a group of responses for each prompt: N = B*G rows, prompt-major, not yet scored.

    ``prefill`` is the beginning of the answer that the prompts end with. The noise is a function of
    the run's seed, the step, the prompt and the sample. Raises Interrupted on all ranks if the run
    is to end.
    """
    stop_tokens = tokenizer.stop_tokens
    keys = row_keys(
        seed=seed,
        step=step,
        prompt_indices=prompts.indices,
        group_size=group_size,
        uses=prompts.uses,
    )
    request = RolloutRequest(
        prompts=prompts.tokens,
        group_size=group_size,
        params=params,
        stop_tokens=stop_tokens,
        keys=keys,
        decode=partial(decode_tokens, tokenizer),
        report=report,
    )
    samples = engine.generate(request)
    interrupt.check()
    tokens, prompt_lengths = join_rows(prompts.tokens, samples)

    def of_rows(of_prompts: list[int]) -> Tensor:
        return torch.tensor(of_prompts, device=tokens.device).repeat_interleave(group_size)  # [N]

    return Trajectory(
        tokens=tokens,
        prompt_indices=of_rows(prompts.indices),
        places=of_rows(prompts.places),
        prompt_lengths=prompt_lengths,
        response_lengths=samples.lengths,
        response_mask=length_mask(samples.lengths, samples.responses.shape[1]),
        truncated=samples.truncated,
        sampler_logprobs=samples.sampler_logprobs,
        behaviour_logprobs=samples.behaviour_logprobs,
        prompts=_repeat(prompts.prompts, group_size),
        completions=decode_responses(tokenizer, samples, stop_tokens=stop_tokens, prefill=prefill),
        columns={name: _repeat(values, group_size) for name, values in prompts.columns.items()},
    )


def _repeat(values: list[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


def decode_responses(
    tokenizer: Any, samples: Samples, *, stop_tokens: Sequence[int], prefill: str = ""
) -> list[str]:
    """Decode sampled responses as rewards see them: the prefill, then the sampled text.

    A final stop token is not part of the text.
    """
    texts = []
    for tokens, length in zip(samples.responses.tolist(), samples.lengths.tolist(), strict=True):
        ends_with_stop = length > 0 and tokens[length - 1] in stop_tokens
        texts.append(prefill + decode_tokens(tokenizer, tokens[: length - ends_with_stop]))
    return texts


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode ids to text, special tokens included; an unknown id becomes U+FFFD.

    Models often have more output rows than their tokenizer has tokens, so that a policy can sample
    an id that its tokenizer cannot decode. The ids around it are then decoded in pieces.
    """
    options = _decode_options(tokenizer.decode)
    try:
        return tokenizer.decode(list(tokens), **options)
    except Exception:  # each tokenizer has its own error for an unknown id
        if len(tokens) < 2:
            return "\ufffd" * len(tokens)
        half = len(tokens) // 2
        return decode_tokens(tokenizer, tokens[:half]) + decode_tokens(tokenizer, tokens[half:])


@lru_cache(maxsize=8)  # called for every token that may end a stop string
def _decode_options(decode: Callable[..., str]) -> dict[str, bool]:
    """Return the arguments with which a tokenizer's ``decode`` leaves nothing out."""
    parameters = inspect.signature(decode).parameters
    return {n: False for n in ("skip_special_tokens", "truncate_at_eos") if n in parameters}


class StopStrings:
    """Finds the token that completes a stop string, wherever the token boundaries lie."""

    # Extra tokens before the longest stop string, so that cutting a text at a token boundary (half
    # a character, a swallowed leading space) cannot change how the string itself is decoded.
    _MARGIN = 4

    def __init__(self, strings: Sequence[str], *, decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        # The number of tokens to look at; each stands for at least one byte.
        self.window = max(len(s.encode()) for s in strings) + self._MARGIN

    def end(self, tokens: Sequence[int], *, start: int) -> int | None:
        """Return the first length above ``start`` at which the last token completes a string."""
        for length in range(start + 1, len(tokens) + 1):
            window = tokens[max(0, length - self.window) : length]
            text = self._decode(window)
            found = [string for string in self._strings if string in text]
            if not found:
                continue
            known = len(os.path.commonprefix([text, self._decode(window[:-1])]))
            if any(string in text[max(0, known + 1 - len(string)) :] for string in found):
                return length
        return None
