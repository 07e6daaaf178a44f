"""Attention during a rollout: over packed prompts, and of new tokens over a group's cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune_grpo.rollout._cache import GroupCache
from torchtune_grpo.rollout._layout import RowLayout
from torchtune_grpo.trajectory import length_mask


@dataclass
class RowState:
    """The live rows of one decoding step, n of them.

    Attributes:
        tokens (Tensor): [n] the last sampled tokens.
        at (RowLayout): where the rows are; their counts include that token.
        prompt_lengths (Tensor): [at.used_slots].
        prompt_width (int): the longest of them, or more.
        width (int): the largest count, or more.
        same_count (int | None): the count of all rows, where it is known to be one.
    """

    tokens: Tensor
    at: RowLayout
    prompt_lengths: Tensor
    prompt_width: int
    width: int
    same_count: int | None


class PromptAttention:
    """Causal attention within prompts that lie side by side; caches their keys and values.

    Args:
        lengths (list[int]): of the prompts.
        slots (list[int]): where in the cache each of them goes.
        cache (GroupCache): with room for them.
    """

    def __init__(self, lengths: list[int], slots: list[int], cache: GroupCache) -> None:
        ends = list(accumulate(lengths))
        self.spans = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
        self._slots = slots
        self._cache = cache

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S, heads, hd], k and v [S, kv_heads, hd] of all prompts -> [S, heads, hd]."""
        keys, values = self._cache.prompt_keys[layer], self._cache.prompt_values[layer]
        out = torch.empty_like(q)
        for span, slot in zip(self.spans, self._slots, strict=True):
            length = span.stop - span.start
            for cached, new in ((keys, k), (values, v)):
                cached[slot, :, :length] = new[span].transpose(0, 1)
                cached[slot, :, length:] = 0  # masked, but it has to be finite
            out[span] = _causal_attention(q[span], k[span], v[span])
        return out


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, heads, hd] of one prompt."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, S, hd]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


class GroupAttention:
    """Attention of one new token per row over its prompt and its own response.

    Scores over the prompt are computed for all rows of a prompt in one product, on a grid of
    [prompts, group_width] places of which some may be empty; the softmax runs over both parts.

    Args:
        rows (RowState): n rows.
        cache (GroupCache): holds their prompts and earlier tokens; receives the new ones.
    """

    def __init__(self, rows: RowState, cache: GroupCache) -> None:
        device = rows.tokens.device
        self._rows = rows
        self._cache = cache
        self._row_index = torch.arange(len(rows.tokens), device=device)
        visible = torch.cat(
            [
                length_mask(rows.prompt_lengths[rows.at.slots], rows.prompt_width),
                length_mask(rows.at.counts, rows.width),
            ],
            dim=1,
        )  # [n, P + C]
        bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
        self._bias = bias[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, hd], k and v [n, kv_heads, hd] of the new tokens -> [n, heads, hd]."""
        rows, cache = self._rows, self._cache
        n, heads, head_dim = q.shape
        prompts, width = rows.at.used_slots, rows.prompt_width
        prompt_keys, prompt_values = (
            cached[layer][:prompts, :, :width]
            for cached in (cache.prompt_keys, cache.prompt_values)
        )
        keys, values = cache.keys[layer][:n], cache.values[layer][:n]
        self._append(keys, k)
        self._append(values, v)
        keys, values = keys[:, :, : rows.width], values[:, :, : rows.width]
        q = q.unflatten(1, (keys.shape[1], -1)) * head_dim**-0.5  # [n, kv, r, hd]
        over_prompt = self._from_grid(self._to_grid(q) @ prompt_keys.mT)  # [n, kv, r, P]
        scores = torch.cat([over_prompt, q @ keys.mT], dim=-1)  # [n, kv, r, P + C]
        probs = (scores + self._bias).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        shared = self._from_grid(self._to_grid(probs[..., :width]) @ prompt_values)
        return (probs[..., width:] @ values + shared).reshape(n, heads, head_dim)

    def _append(self, cached: Tensor, new: Tensor) -> None:
        """Writes [n, kv_heads, hd] behind each row's earlier tokens."""
        if self._rows.same_count is not None:
            cached[:, :, self._rows.same_count - 1] = new
        else:
            cached[self._row_index, :, self._rows.at.counts - 1] = new

    def _to_grid(self, x: Tensor) -> Tensor:
        """[n, kv, r, d] -> [prompts, kv, group_width * r, d], anything in empty places."""
        at = self._rows.at
        grid = x if at.grid is None else x[at.grid]
        grid = grid.unflatten(0, (at.used_slots, at.group_width))
        return grid.transpose(1, 2).flatten(2, 3)

    def _from_grid(self, x: Tensor) -> Tensor:
        """[prompts, kv, group_width * r, d] -> [n, kv, r, d]."""
        at = self._rows.at
        grid = x.unflatten(2, (at.group_width, -1))
        if at.grid is None:
            return grid.transpose(1, 2).flatten(0, 1)
        return grid[at.slots, :, at.columns]
