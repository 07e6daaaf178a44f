"""One token per row from a row of logits: temperature, top-k, top-p, and its log-prob."""

from __future__ import annotations

import torch
from torch import Tensor


def filter_logits(logits: Tensor, *, top_k: int | None, top_p: float | None) -> Tensor:
    """Sets every logit outside the top k, or outside the nucleus, to -inf.

    Args:
        logits (Tensor): [N, V].
        top_k (int | None): keep the k largest; ties with the k-th are kept too.
        top_p (float | None): keep the smallest set of largest tokens whose probabilities sum to at
            least top_p (Holtzman et al. 2020, arXiv:1904.09751, section 3.1).

    Returns:
        Tensor: [N, V].
    """
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # the mass before a token is enough
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)
    return logits


def sample_tokens(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples by inverse CDF: one uniform number per row, exact for every filter.

    Args:
        logits (Tensor): [N, V].
        temperature (float): 0 takes the most likely token.
        top_k (int | None): see :func:`filter_logits`.
        top_p (float | None): see :func:`filter_logits`.
        generator (torch.Generator | None): on the logits' device.

    Returns:
        tuple[Tensor, Tensor]: tokens [N], and their log-probs [N] under the *unfiltered*
        ``softmax(logits / temperature)`` (temperature 1 when greedy), float32.
    """
    logits = logits.float()
    if temperature > 0:
        logits = logits / temperature
        probs = filter_logits(logits, top_k=top_k, top_p=top_p).softmax(dim=-1)
        cdf = probs.cumsum(dim=-1)
        uniform = torch.rand(logits.shape[0], 1, device=logits.device, generator=generator)
        # right=True never lands on a token of probability zero, whose cdf step is empty.
        tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
        # uniform * total can round up to total itself: then take the last possible token.
        last = (cdf < cdf[:, -1:]).sum(dim=-1, keepdim=True)
        tokens = torch.minimum(tokens, last)
    else:
        tokens = logits.argmax(dim=-1, keepdim=True)
    logprobs = logits.gather(-1, tokens) - logits.logsumexp(dim=-1, keepdim=True)
    return tokens.squeeze(-1), logprobs.squeeze(-1)
