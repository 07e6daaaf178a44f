"""The request to an engine, and how its samples become rows to score and train on."""

from __future__ import annotations

import inspect
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from tqdm import tqdm

from torchtune_grpo.config.keys import Correction, GRPOConfig, RolloutConfig, SamplingParams
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.environments.conversations import Conversations, check_failures
from torchtune_grpo.environments.environment import Environment
from torchtune_grpo.machine import interrupt
from torchtune_grpo.rollout.sampling import row_keys
from torchtune_grpo.trajectory import Completion, Samples, Trajectory, join_rows

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


class Turns(Protocol):
    """Replies to the policy at the end of its turns, while the engine goes on with other rows.

    A turn ends with a stop token or a stop string; then the row pauses until it has a reply, whose
    tokens continue its response: they are not ``Samples.sampled``, and have log-probs of 0. A row
    that reaches a limit of the request within a turn is cut off, unasked: it is
    ``Samples.truncated``. So is one that has no reply when a deadline or an interrupt ends the
    rollout.

    Rows are numbered 0 to N - 1, see ``RolloutRequest``. The engine calls both methods from
    one thread, between tokens: neither may wait for a tool.
    """

    def end_turn(self, row: int, response: Sequence[int], *, sampled: int) -> None:
        """Take note that a row has ended a turn; it is asked about once for each turn.

        ``response`` are all of its tokens so far, earlier replies included; the last one ended the
        turn. The policy has ``sampled`` so many of them.
        """
        ...

    def replies(self, *, wait: bool) -> Mapping[int, Sequence[int]]:
        """Return the replies that have come since the last call, by row: the tokens that come next.

        An empty reply ends the row, which is then not truncated. No reply may fill the response:
        ``len(response) + len(reply) < request.max_row_tokens`` and ``sampled <
        params.max_generated_tokens``, so that at least one token is left to sample. With ``wait``
        the rollout waits for replies: wait a moment for one, but at most about 50 ms, so that the
        engine sees deadlines and interrupts.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A request for a group of responses to each prompt: N = B*G rows, prompt-major.

    ``keys`` [N] int64 seed the rows' noise, see ``row_keys``: a response depends on its prompt,
    its key and the policy, and on nothing else. ``decode`` turns token ids into text, and is needed
    for ``params.stop_strings``. ``report`` is called with the progress now and then.
    Ids from ``vocab_size`` on are never sampled; None samples all that the model has.
    ``params.max_generated_tokens`` bounds the tokens that a row samples, over all of its turns, and
    ``row_limit`` all of its response's tokens; None is the same bound. Without ``turns`` a response
    is one turn. ``params.min_new_tokens`` counts from the response's beginning.
    """

    prompts: Sequence[Sequence[int]]  # none of them empty
    group_size: int
    params: SamplingParams
    stop_tokens: Sequence[int]
    keys: Tensor
    decode: Decode | None = None
    report: Callable[[Progress], None] | None = None
    vocab_size: int | None = None
    row_limit: int | None = None
    turns: Turns | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.prompts) * self.group_size

    @property
    def max_row_tokens(self) -> int:
        """The most tokens of a response, sampled or not."""
        return self.row_limit or self.params.max_generated_tokens

    @property
    def stop_strings(self) -> StopStrings | None:
        """A search for the strings that end a turn, if there are any."""
        if not self.params.stop_strings:
            return None
        assert self.decode is not None
        return StopStrings(self.params.stop_strings, decode=self.decode)


@dataclass(frozen=True)
class EngineContext:
    """Arguments of ``Engine(context)``, beside those that the config gives by name.

    The model is neither compiled nor sharded yet. Its weights may be on another device than
    ``device``, where to compute. ``bytes_to_come`` tells at any time how much of the memory that
    is free there training is going to take. ``model_dir`` holds the model's ``config.json``.
    """

    model: TransformerDecoder
    settings: RolloutConfig
    device: torch.device
    bytes_to_come: Callable[[], int] = lambda: 0
    model_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do and what it wants; what it does not declare, it cannot do."""

    turns: bool = False  # asks ``request.turns`` for a reply at the end of each turn
    filters: bool = False  # follows the parameters that ``filters_in`` finds
    reproducible: bool = False  # without a deadline, samples depend on request and weights alone
    longest_row: int | None = None  # tokens of a prompt with its response; None = as the model
    modules: tuple[str, ...] = ("torchtune",)  # whose compute what it samples: ``ModelKind``
    correction: Correction | None = None  # objective.sampling_correction if the config has none


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples a group of responses for each prompt, one call for each round of a step.

    An engine is a class derived from this one, called with an ``EngineContext`` and the arguments
    in the config's node. Only ``generate`` must be written.
    """

    @classmethod
    def capabilities(cls, **arguments: Any) -> Capabilities:
        """Return what it can do with the config's arguments, before any weights are read."""
        return Capabilities()

    @classmethod
    def check(cls, cfg: GRPOConfig) -> None:
        """Raise a ConfigError with all in a config that it cannot do for reasons of its own."""
        return None

    @abstractmethod
    def generate(self, request: RolloutRequest) -> Samples:
        """Sample all rows of a request with the model's current weights.

        It ends early, with what there is, if ``must_stop`` says so.
        """
        ...

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """Raise a ValueError if a step's metrics show that another policy has sampled."""
        return None

    def close(self) -> None:
        """Give back all that it holds, such as memory and processes of its own."""
        return None


def explained_by_rounding(dtype: torch.dtype) -> tuple[str, float]:
    """Return which difference of an engine's log-probs from the trainer's counts, and its bound."""
    return ("max", 0.01) if dtype == torch.float32 else ("mean", 0.1)


def must_stop(deadline: float | None) -> Callable[[], bool]:
    """Return a function that tells between tokens if a deadline or an interrupt ends a rollout.

    ``deadline`` is in seconds from now.
    """
    end = math.inf if deadline is None else time.monotonic() + deadline
    return lambda: time.monotonic() > end or interrupt.is_interrupted()


def sample_groups(
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
    environment: Environment | None = None,
) -> Trajectory:
    """Sample a group of responses for each prompt: N = B*G rows, prompt-major, not yet scored.

    ``prefill`` is the beginning of the answer that the prompts end with. The noise is a function of
    the run's seed, the step, the prompt and the sample. With an ``environment`` a response is a
    whole conversation. Raises Interrupted on all ranks if the run is to end, and a ValueError if
    all conversations have failed.
    """
    stop_tokens = tokenizer.stop_tokens
    decode = partial(decode_tokens, tokenizer)
    keys = row_keys(
        seed=seed,
        step=step,
        prompt_indices=prompts.indices,
        group_size=group_size,
        uses=prompts.uses,
    )
    talks = None
    if environment is not None:
        talks = Conversations(
            environment,
            prompts,
            group_size,
            seeds=[key % 2**31 for key in keys[::group_size].tolist()],  # all generators take it
            max_sampled=params.max_generated_tokens,
            decode=decode,
        )
    request = RolloutRequest(
        prompts=prompts.tokens if talks is None else talks.prompt_tokens,
        group_size=group_size if talks is None else talks.group_size,
        params=params,
        stop_tokens=stop_tokens,
        keys=keys,
        decode=decode,
        report=report,
        vocab_size=_known_ids(tokenizer),
        row_limit=None if talks is None else talks.row_limit,
        turns=talks,
    )
    try:
        samples = engine.generate(request)
        interrupt.check()
    except BaseException:  # such as Ctrl-C
        if talks is not None:
            talks.drop()
        raise
    tokens, prompt_lengths = join_rows(request.prompts, samples)
    if talks is None:
        completions = _completions(samples, request, decode=decode, prefill=prefill)
    else:
        completions = talks.finish(samples)
        check_failures(completions)

    def of_rows(of_prompts: list[int]) -> Tensor:
        return torch.tensor(of_prompts, device=tokens.device).repeat_interleave(group_size)  # [N]

    return Trajectory(
        tokens=tokens,
        prompt_indices=of_rows(prompts.indices),
        step_indices=of_rows(prompts.step_indices),
        prompt_lengths=prompt_lengths,
        response_lengths=samples.lengths,
        sampled=samples.sampled,
        response_mask=samples.sampled,
        truncated=samples.truncated,
        sampler_logprobs=samples.sampler_logprobs,
        behaviour_logprobs=samples.behaviour_logprobs,
        prompts=_repeat(prompts.prompts, group_size) if talks is None else talks.prompts,
        completions=completions,
        columns={name: _repeat(values, group_size) for name, values in prompts.columns.items()},
    )


def _known_ids(tokenizer: Any) -> int | None:
    """Return the number of ids up to the tokenizer's last; None if it does not tell."""
    size = getattr(tokenizer, "vocab_size", None)
    special = getattr(tokenizer, "special_tokens", None) or {}
    known = [*tokenizer.stop_tokens, *special.values()]
    return None if size is None else max(size, *(token + 1 for token in known))


def _repeat(values: list[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


def _completions(
    samples: Samples, request: RolloutRequest, *, decode: Decode, prefill: str
) -> list[Completion]:
    """Decode responses of one turn: the prefill, then the sampled text without its stop token."""
    found = []
    rows = (samples.responses.tolist(), samples.lengths.tolist(), samples.truncated.tolist())
    for tokens, length, truncated in zip(*rows, strict=True):
        ends_with_stop = length > 0 and tokens[length - 1] in request.stop_tokens
        ended = "stop_token" if ends_with_stop else "stop_string"
        if truncated:
            ended = "length" if length >= request.max_row_tokens else "deadline"
        text = prefill + decode(tokens[: length - ends_with_stop])
        found.append(Completion.of(text, ended))
    return found


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode ids to text, special tokens included; an unknown id becomes U+FFFD.

    A tokenizer may have gaps, and need not tell how many ids it knows; what is around an unknown
    one is decoded in pieces.
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
