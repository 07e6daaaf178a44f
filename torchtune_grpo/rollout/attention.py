"""The rollout's attention: prompts side by side, and one new token for every live row.

Decoding attention has two implementations. On CUDA, where possible, one kernel per layer reads each
row's own length, so that its launch is the same for all lengths. Elsewhere, one product computes
the scores over a prompt for all of its rows, which is faster on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchtune import utils

from torchtune_grpo.machine.attention import (
    Segments,
    is_since_ampere,
    shared_beginning,
    varlen_attention,
)
from torchtune_grpo.rollout.cache import CacheShape, GroupCache, PromptGrid, RowLayout

log = utils.get_logger("INFO")


class PromptAttention:
    """Causal attention within prompts that lie side by side; caches their keys and values.

    The beginning that all prompts share comes once, before the rest of each. ``slots`` are the
    prompts' places in the cache.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], slots: list[int], cache: GroupCache
    ) -> None:
        device = cache.shape.device
        beginning = range(shared_beginning(prompts))
        tokens, positions = list(prompts[0][: len(beginning)]), list(beginning)
        parts: list[list[range]] = [[beginning]]
        cached: list[list[int]] = []  # slot, position and token of each key and value
        for prompt, slot in zip(prompts, slots, strict=True):
            rest = range(len(tokens), len(tokens) + len(prompt) - len(beginning))
            tokens += prompt[len(beginning) :]
            positions += range(len(beginning), len(prompt))
            parts.append([beginning, rest])
            cached += ([slot, at, token] for at, token in enumerate([*beginning, *rest]))
        self.tokens, self.positions = torch.tensor([tokens, positions], device=device)  # [S] each
        self.ends = torch.tensor([rest[-1] for _, rest in parts[1:]], device=device)  # [prompts]
        self._cache, self._fresh = cache, torch.tensor(slots, device=device)
        self._slots, self._places, self._of = torch.tensor(cached, device=device).t()
        self._segments = Segments.of(parts, device=device)

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """[S, q heads + 2 kv heads, hd] of all prompts -> [S, q heads * hd]."""
        q, new = _split(heads, self._cache.shape.kv_heads)
        cached = self._cache.prompts[layer]
        cached.index_fill_(1, self._fresh, 0)  # masked values have to be finite, too
        cached[:, self._slots, :, self._places] = new[self._of]
        return varlen_attention(q, new[:, 0], new[:, 1], self._segments).flatten(1)


class GridAttention:
    """Attention of one new token per row over its prompt and its own response.

    Scores over the prompt are computed for all rows of a prompt in one product, on a grid of
    [prompts, width] cells, some of which may be empty; the softmax runs over both parts. ``width``
    columns of the responses are read.
    """

    def __init__(
        self, at: RowLayout, grid: PromptGrid, cache: GroupCache, *, width: int, heads: int
    ) -> None:
        self.positions = at.positions
        self._at, self._grid, self._cache, self._width = at, grid, cache, width
        grid.show_last(at)
        self._bias = grid.bias[..., : grid.prompt_width + width]  # [n, 1, 1, P + C]
        rows = len(at.rows) * cache.shape.kv_heads
        shape = (rows, heads // cache.shape.kv_heads, self._bias.shape[-1])
        self._scores = grid.bias.new_empty(shape)  # [n * kv, r, P + C], written by each layer

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """[n, q heads + 2 kv heads, hd] of the new tokens -> [n, q heads * hd]."""
        at, grid, width = self._at, self._grid, self._grid.prompt_width
        n, kv, slots = len(heads), self._cache.shape.kv_heads, grid.slots
        q, new = _split(heads, kv)
        rows = self._cache.rows[layer]
        rows[:, at.places, :, at.last] = new
        keys, values = rows[:, :n, :, : self._width].flatten(1, 2)  # [n * kv, C, hd]
        of_prompts = self._cache.prompts[layer][:, :slots, :, :width]
        prompt_keys, prompt_values = of_prompts.flatten(1, 2)  # [slots * kv, P, hd]

        q = q.unflatten(1, (kv, -1))[grid.gather]  # [cells + n * kv, r, hd]
        of_grid, of_rows = q.tensor_split((grid.cells,))
        over_prompt = torch.bmm(of_grid.reshape(slots * kv, -1, q.shape[-1]), prompt_keys.mT)
        over_prompt = over_prompt.view(grid.cells, -1, width)  # [cells, r, P]
        scores = self._scores  # [n * kv, r, P + C]
        torch.index_select(over_prompt, 0, grid.scatter, out=scores[..., :width])
        scores[..., width:] = torch.bmm(of_rows, keys.mT)  # with out=, a strided result is slow
        by_row = scores.unflatten(0, (n, kv))
        torch.add(self._bias, by_row, alpha=q.shape[-1] ** -0.5, out=by_row)
        probs = scores.softmax(dim=-1)  # in float32, whatever the scores' dtype
        shared = probs.unflatten(0, (n, kv))[..., :width][grid.gather_cells]  # [cells, r, P]
        shared = torch.bmm(shared.view(slots * kv, -1, width), prompt_values)
        shared = shared.view(grid.cells, -1, q.shape[-1])
        out = shared.index_select(0, grid.scatter)  # [n * kv, r, hd]
        return out.baddbmm_(probs[..., width:], values).view(n, -1)


class KernelAttention:
    """Attention of one new token per row as one operator, which a Triton kernel computes.

    The operator takes the token's ``heads`` [n, q heads + 2 kv heads, hd], a layer's cache of
    ``prompts`` and ``rows``, and for each row its prompt's slot, its prompt's length, and the index
    of the new token in its response. It caches the token's key and value, attends to the prompt,
    the response so far and the token itself, and returns [n, q heads * hd]. With a ``table``
    [T, 2, 1, hd] of rotations it first rotates queries and keys to the token's position.
    """

    def __init__(self, at: RowLayout, cache: GroupCache) -> None:
        self.positions = at.positions
        self._layout, self._cache = (at.slots, at.prompt_lengths, at.last, at.positions), cache

    def __call__(self, layer: int, heads: Tensor, *, table: Tensor | None = None) -> Tensor:
        """[n, q heads + 2 kv heads, hd] of the new tokens -> [n, q heads * hd]."""
        of_layer = self._cache.prompts[layer], self._cache.rows[layer]
        return _decode_attention(heads, *of_layer, *self._layout, table)


# A torch operator, so that profilers and fake tensors count one operation, as a GPU does.
OPERATOR = "torchtune_grpo::decode_attention"
_ARGUMENTS = (
    "Tensor heads, Tensor prompts, Tensor(a!) rows, Tensor slots, Tensor lengths, Tensor last, "
    "Tensor positions, Tensor? table"
)
torch.library.define(OPERATOR, f"({_ARGUMENTS}) -> Tensor")
_decode_attention = torch.ops.torchtune_grpo.decode_attention.default


@torch.library.impl(OPERATOR, "cuda")
def _launch(*args: Any) -> Tensor:
    from torchtune_grpo.rollout.kernel import launch

    return launch(*args)


@torch.library.register_fake(OPERATOR)
def _result(heads: Tensor, prompts: Tensor, rows: Tensor, *others: Any) -> Tensor:
    return heads.new_empty(len(heads), (heads.shape[1] - 2 * rows.shape[2]) * heads.shape[2])


def kernel_runs(shape: CacheShape, *, heads: int) -> bool:
    """Whether KernelAttention works here: on GPUs since Ampere, a trial run decides.

    Triton, or the C compiler that it calls, may be missing.
    """
    device = shape.device
    if device.type != "cuda" or not is_since_ampere(device):
        return False
    size = (2, 1, shape.kv_heads, GroupCache.BLOCK, shape.head_dim)
    cache = torch.zeros(size, dtype=shape.dtype, device=device)
    new = cache.new_zeros(1, heads + 2 * shape.kv_heads, shape.head_dim)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    table = cache.new_zeros(1, 2, 1, shape.head_dim)
    try:
        _decode_attention(new, cache, cache.clone(), zero, zero, zero, zero, table)
    except Exception as error:  # Triton raises many types of its own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        log.warning(
            f"Rolling out without the Triton kernel and CUDA graphs, which is slower: {first}. "
            "Triton comes with torch for CUDA, and needs a C compiler (gcc or clang)."
        )
        return False
    return True


def _split(heads: Tensor, kv: int) -> tuple[Tensor, Tensor]:
    """[K, q heads + 2 kv heads, hd] -> q [K, q heads, hd], and keys and values [K, 2, kv, hd]."""
    q, both = heads.tensor_split((heads.shape[1] - 2 * kv,), dim=1)
    return q, both.unflatten(1, (2, kv))
