"""Attention during a rollout: over packed prompts, and of new tokens over a group's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtune_grpo.machine.attention import Spans, varlen_attention
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.layout import RowLayout


class PromptAttention:
    """Causal attention within prompts that lie side by side; caches their keys and values.

    Args:
        lengths (list[int]): of the prompts.
        slots (list[int]): where in the cache each of them goes.
        cache (GroupCache): with room for them.
    """

    def __init__(self, lengths: list[int], slots: list[int], cache: GroupCache) -> None:
        device = cache.shape.device
        parts = list(zip(lengths, slots, strict=True))
        self._cache = cache
        self._spans = Spans.of(lengths, lengths, device=device)
        self._fresh = torch.tensor(slots, device=device)
        of_tokens = [[slot, token] for length, slot in parts for token in range(length)]
        self._slots, self.positions = torch.tensor(of_tokens).t().to(device)  # [S] each
        self.ends = self._spans.query_ends[1:] - 1  # [prompts] each one's last token

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """[S, q heads + 2 kv heads, hd] of all prompts -> [S, q heads * hd]."""
        q, new = _split(heads, self._cache)
        cached = self._cache.prompts[layer]
        cached.index_fill_(1, self._fresh, 0)  # what is masked has to be finite as well
        cached[:, self._slots, :, self.positions] = new
        return varlen_attention(q, new[:, 0], new[:, 1], self._spans).flatten(1)


class GroupAttention:
    """Attention of one new token per row over its prompt and its own response.

    Scores over the prompt are computed for all rows of a prompt in one product, on a grid of
    [prompts, group_width] places of which some may be empty; the softmax runs over both parts.

    Args:
        at (RowLayout): n rows; the last token of each is the new one.
        cache (GroupCache): holds their prompts and earlier tokens; receives the new ones.
        width (int): columns of the responses that are read; the longest response, or more.
        heads (int): of the queries.
    """

    def __init__(self, at: RowLayout, cache: GroupCache, *, width: int, heads: int) -> None:
        self.positions = at.positions
        self._at, self._cache, self._width = at, cache, width
        self._bias = at.bias[..., : at.prompt_width + width]  # [n, 1, 1, P + C]
        rows = len(at.rows) * cache.shape.kv_heads
        shape = (rows, heads // cache.shape.kv_heads, self._bias.shape[-1])
        self._scores = self._bias.new_empty(shape)  # [n * kv, r, P + C], written by each layer

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """[n, q heads + 2 kv heads, hd] of the new tokens -> [n, q heads * hd]."""
        at, cache, width = self._at, self._cache, self._at.prompt_width
        n, kv, slots = len(heads), cache.shape.kv_heads, at.used_slots
        q, new = _split(heads, cache)
        rows = cache.rows[layer]
        rows[:, at.places, :, at.last] = new
        keys, values = rows[:, :n, :, : self._width].flatten(1, 2)  # [n * kv, C, hd]
        prompt_keys, prompt_values = cache.prompts[layer][:, :slots, :, :width].flatten(1, 2)

        q = q.unflatten(1, (kv, -1))[at.gather]  # [cells + n * kv, r, hd]
        of_grid, of_rows = q.tensor_split((at.cells,))
        over_prompt = torch.bmm(of_grid.reshape(slots * kv, -1, q.shape[-1]), prompt_keys.mT)
        over_prompt = over_prompt.view(at.cells, -1, width)  # [cells, r, P]
        scores = self._scores  # [n * kv, r, P + C]
        torch.index_select(over_prompt, 0, at.scatter, out=scores[..., :width])
        if scores.is_cuda:
            torch.bmm(of_rows, keys.mT, out=scores[..., width:])
        else:  # which would write a strided result matrix by matrix
            scores[..., width:] = torch.bmm(of_rows, keys.mT)
        by_row = scores.unflatten(0, (n, kv))
        torch.add(self._bias, by_row, alpha=cache.shape.head_dim**-0.5, out=by_row)
        probs = scores.softmax(dim=-1)  # in float32, whatever the scores are
        shared = probs.unflatten(0, (n, kv))[..., :width][at.gather_grid]  # [cells, r, P]
        shared = torch.bmm(shared.view(slots * kv, -1, width), prompt_values)
        out = shared.view(at.cells, -1, q.shape[-1]).index_select(0, at.scatter)  # [n * kv, r, hd]
        return out.baddbmm_(probs[..., width:], values).view(n, -1)


def _split(heads: Tensor, cache: GroupCache) -> tuple[Tensor, Tensor]:
    """[K, q heads + 2 kv heads, hd] -> q [K, q heads, hd], and keys and values [K, 2, kv, hd]."""
    kv = cache.shape.kv_heads
    q, both = heads.tensor_split((heads.shape[1] - 2 * kv,), dim=1)
    return q, both.unflatten(1, (2, kv))
