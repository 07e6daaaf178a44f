"""One token per row from a row of logits: penalties, temperature, filters, noise and log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.rollout.graphs import Buffers

_BLOCK = 128  # vocabulary entries summed at once; only one block per row is searched entry by entry
# Logits sampled from at once on a CPU. Larger tensors are mapped and zeroed anew for each token,
# which for 64 rows of 152k costs several times as much as the sampling.
_PART = 2**19


# The keys that change softmax(logits / temperature), each with the value that does not
_NEUTRAL: dict[str, object] = {
    "top_k": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def filters_in(values: Mapping[str, object]) -> dict[str, object]:
    """Return the sampling keys with which tokens are not drawn from softmax(logits / temperature).

    ``values`` are a config's ``sampling``, changes to it, or a request's ``params``.
    """
    found = {name: values.get(name) for name in _NEUTRAL}
    return {name: x for name, x in found.items() if x not in (None, _NEUTRAL[name])}


def filter_logits(
    logits: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Set the logits that a filter leaves out to -inf: [N, V], divided by the temperature.

    top_k keeps the k largest; ties with the k-th are kept too. top_p keeps the smallest set of the
    likeliest tokens whose probabilities sum to at least top_p (Holtzman et al. 2020,
    arXiv:1904.09751, section 3.1), among those that top_k leaves. min_p keeps tokens at least min_p
    times as likely as the likeliest one (Nguyen et al. 2024, arXiv:2407.01082). Without filters the
    same tensor is returned.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # the mass before a token is enough
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)
    if min_p is not None and min_p > 0:
        floor = logits.amax(dim=-1, keepdim=True) + math.log(min_p)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def sample_inverse_cdf(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens with one uniform number per row, exactly under every filter.

    The cumulative sum runs over blocks of the vocabulary and then within the block that was hit, so
    that the whole vocabulary is read only to sum it. Probabilities [N, V] are float32 and sum to
    about 1; a token of probability 0 is never drawn. Uniforms [N] are float64 in [0, 1). Returns
    tokens [N] and their log-probs [N] in float64.
    """
    vocab = probs.shape[-1]
    if vocab % _BLOCK:
        probs = F.pad(probs, (0, -vocab % _BLOCK))
    # Written as a sum over rows of the transpose, this is fast in either layout of the logits.
    sums = probs.t().unflatten(0, (-1, _BLOCK)).sum(dim=1).t()
    cdf = sums.cumsum(dim=-1, dtype=torch.float64)  # [N, blocks]
    target = cdf[:, -1:] * uniforms[:, None]  # below the last sum, even when rounded
    # The block of the first sum above the target; with NaN it is past the end.
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)  # [N, 1]
    before = F.pad(cdf, (1, 0)).gather(-1, block)
    of_block = block[..., None].expand(-1, -1, _BLOCK)
    entries = probs.unflatten(-1, (-1, _BLOCK)).gather(1, of_block)[:, 0]  # [N, _BLOCK]
    within = entries.cumsum(dim=-1, dtype=torch.float64)
    # The last of these sums may be rounded to less than the block's sum.
    target = torch.minimum(target - before, within[:, -1:] * (1 - 2**-53))
    offset = torch.searchsorted(within, target, right=True)
    tokens = torch.add(offset, block, alpha=_BLOCK).clamp_(max=vocab - 1)
    drawn = probs.gather(-1, tokens) / cdf[:, -1:]
    return tokens[:, 0], drawn.log_()[:, 0]


def bytes_per_logit(params: SamplingParams) -> int:
    """Return the most bytes per entry of a row's logits and what ``Sampler`` makes of them."""
    logits = 4 if params.temperature in (0, 1) else 8
    changed = 4 * params.changes_logits
    filters = params.top_k is not None or params.min_p is not None
    drawn = 4 * filters + 2 * 4  # filtered; probabilities, and a copy padded to whole blocks
    if params.top_p is not None:
        drawn = 4 + 4 + 8 + 3 * 4  # after top-k; sorted, with indices; probabilities and two sums
    return logits + max(4 * changed, changed + drawn) + (params.repetition_penalty != 1)


class Sampler:
    """Samples one token per row below ``vocab_size``; no stop token before ``min_new_tokens``."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        stop_tokens: Sequence[int] = (),
        vocab_size: int | None = None,
        buffers: Buffers,
    ) -> None:
        self._params, self._vocab_size = params, vocab_size
        self._stops = buffers.put("stop tokens", torch.tensor(stop_tokens, dtype=torch.long))

    def __call__(
        self,
        logits: Tensor,
        *,
        uniforms: Tensor,
        counts: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample from logits [N, V] with uniforms [N], float64 in [0, 1).

        ``counts`` [N] are the numbers of tokens that the responses have so far, needed if
        ``params.changes_logits``; ``seen`` [N, V] bool marks the tokens of prompt and response so
        far, needed by the repetition penalty.

        Returns tokens [N]; the sampler's log-probs [N], which the trainer recomputes, under the
        plain ``softmax(logits / temperature)`` (temperature 1 when greedy); and the behaviour's
        log-probs [N], under the distribution that the tokens were drawn from, with penalties and
        filters (0 when greedy). Both are float32.
        """
        rows = max(1, _PART // logits.shape[-1])
        if logits.device.type != "cpu" or len(logits) <= rows:
            return self._sample(logits, uniforms=uniforms, counts=counts, seen=seen)
        parts = []
        for first in range(0, len(logits), rows):
            at = slice(first, first + rows)
            of_part = None if counts is None else counts[at], None if seen is None else seen[at]
            parts.append(self._sample(logits[at], uniforms[at], *of_part))
        tokens, sampler_logprobs, behaviour_logprobs = map(torch.cat, zip(*parts, strict=True))
        return tokens, sampler_logprobs, behaviour_logprobs

    def _sample(
        self, logits: Tensor, uniforms: Tensor, counts: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what ``__call__`` does for all rows at once."""
        params = self._params
        plain = logits.float()
        if params.temperature not in (0, 1):
            plain = plain / params.temperature
        drawn_from = known = plain[:, : self._vocab_size]
        if params.changes_logits:
            assert counts is not None
            drawn_from = self._adjust(drawn_from, seen=seen, counts=counts)
        if params.temperature == 0:
            tokens = drawn_from.argmax(dim=-1)
            behaviour_logprobs = torch.zeros_like(plain[:, 0])
        else:
            drawn_from = filter_logits(
                drawn_from, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
            )
            if drawn_from is known:  # only ids beyond the tokenizer's are never drawn
                probs = plain.softmax(dim=-1)
                beyond = probs[:, known.shape[-1] :]
                mass = beyond.sum(dim=-1)
                beyond.zero_()
                tokens, logprobs = sample_inverse_cdf(probs, uniforms)
                tokens.clamp_(max=known.shape[-1] - 1)  # with NaN it may be any
                return tokens, (logprobs + (-mass).log1p()).float(), logprobs.float()
            tokens, logprobs = sample_inverse_cdf(drawn_from.softmax(dim=-1), uniforms)
            behaviour_logprobs = logprobs.float()
        sampler_logprobs = plain.gather(-1, tokens[:, None])[:, 0] - plain.logsumexp(dim=-1)
        return tokens, sampler_logprobs, behaviour_logprobs

    def _adjust(self, logits: Tensor, *, seen: Tensor | None, counts: Tensor) -> Tensor:
        """Apply the repetition penalty (it commutes with temperature) and bar early stop tokens."""
        params = self._params
        if params.repetition_penalty != 1:
            assert seen is not None, "the engines keep track of it where it is needed"
            penalty = params.repetition_penalty
            penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(seen[:, : logits.shape[-1]], penalized, logits)
        if params.min_new_tokens and len(self._stops):
            without_stops = logits.index_fill(-1, self._stops, -torch.inf)
            logits = torch.where((counts < params.min_new_tokens)[:, None], without_stops, logits)
        return logits


# The noise: uniform numbers as a pure function of (seed, step, prompt, sample, position). A
# counter-based generator has no state to save and none that depends on which rows run together, so
# samples do not change with the batch, with the number of live rows or ranks, or after a resume.


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)  # >> of int64 copies the sign bit


def mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele et al. 2014, "Fast splittable pseudorandom generators")."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def row_keys(
    *,
    seed: int,
    step: int,
    prompt_indices: Sequence[int],
    group_size: int,
    uses: Sequence[int] | None = None,
) -> Tensor:
    """Return the keys [B*G] int64 of the rows' noise, prompt-major.

    ``prompt_indices`` are the B prompts' positions in the data set. Steps count from 0; evaluation
    uses -1. Numbering continues after a prompt's samples of earlier rounds (``uses`` groups).
    """
    key = torch.zeros((), dtype=torch.int64)
    prompts = torch.tensor(prompt_indices)[:, None]
    samples = torch.arange(group_size)
    if uses is not None:
        samples = samples + torch.tensor(uses)[:, None] * group_size
    for part in (seed, step, prompts, samples):
        key = mix((key + _GOLDEN) ^ mix(torch.as_tensor(part) + _GOLDEN))
    return key.flatten()


def uniforms(keys: Tensor, count: int) -> Tensor:
    """Return each row's first ``count`` numbers: keys [N] -> [N, count] float64 in [0, 1)."""
    counter = torch.arange(1, count + 1, device=keys.device)
    bits = mix(keys[:, None] + counter * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53
