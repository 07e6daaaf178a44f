"""The rollout's attention: prompts or replies side by side, and one new token per live row.

Decoding attention has two implementations. On CUDA, where possible, one kernel per layer reads each
row's own length, so that its launch is the same for all lengths. Elsewhere, one product computes
the scores over a prompt for all of its rows, which is faster on a CPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtune import utils

from torchtune_grpo.machine.segments import (
    Segments,
    is_since_ampere,
    shared_beginning,
    varlen_attention,
)
from torchtune_grpo.rollout.cache import CachedPrompt, CacheShape, GroupCache, LiveRows, Row
from torchtune_grpo.trajectory import length_mask

log = utils.get_logger("INFO")


class PromptAttention:
    """Causal attention within prompts that lie side by side; caches their keys and values.

    The beginning that all prompts share comes once, before the rest of each.
    """

    def __init__(self, prompts: Sequence[CachedPrompt], cache: GroupCache) -> None:
        device = cache.shape.device
        beginning = range(shared_beginning([prompt.tokens for prompt in prompts]))
        tokens, positions = list(prompts[0].tokens[: len(beginning)]), list(beginning)
        parts: list[list[range]] = [[beginning]]
        cached: list[list[int]] = []  # slot, position and token of each key and value
        for prompt in prompts:
            rest = range(len(tokens), len(tokens) + len(prompt.tokens) - len(beginning))
            tokens += prompt.tokens[len(beginning) :]
            positions += range(len(beginning), len(prompt.tokens))
            parts.append([beginning, rest])
            cached += ([prompt.slot, at, token] for at, token in enumerate([*beginning, *rest]))
        self.tokens, self.positions = torch.tensor([tokens, positions], device=device)  # [S] each
        self.ends = torch.tensor([rest[-1] for _, rest in parts[1:]], device=device)  # [prompts]
        slots = [prompt.slot for prompt in prompts]
        self._cache, self._fresh = cache, torch.tensor(slots, device=device)
        self._slots, self._columns, self._of = torch.tensor(cached, device=device).t()
        self._segments = Segments.from_ranges(parts, device=device)

    def __call__(self, layer: int, heads: Tensor, *, window: int | None) -> Tensor:
        """[S, q heads + 2 kv heads, hd] of all prompts -> [S, q heads * hd]."""
        q, new = _split(heads, self._cache.shape.kv_heads)
        cached = self._cache.prompts[layer]
        cached.index_fill_(1, self._fresh, 0)  # masked values have to be finite, too
        cached[:, self._slots, :, self._columns] = new[self._of]
        return varlen_attention(q, new[:, 0], new[:, 1], self._segments, window=window).flatten(1)


class ReplyAttention:
    """Causal attention of rows' newest tokens, which lie side by side; caches keys and values.

    These are the last token of a turn, which was sampled and not fed yet, and the reply to it. They
    see their prompt, and the response before them.
    """

    def __init__(self, rows: Sequence[Row], cache: GroupCache) -> None:
        prompts: dict[CachedPrompt, range] = {}  # where its keys lie, which come once
        responses, new, end = [], [], 0
        for row in rows:
            if row.prompt not in prompts:
                prompts[row.prompt] = range(end, end := end + len(row.prompt.tokens))
        for row in rows:
            first, stop = row.count - 1, len(row.response)
            new.append(range(first, stop))
            responses.append([range(end, end + first), range(end + first, end := end + stop)])
        parts = [[prompts[row.prompt], *own] for row, own in zip(rows, responses, strict=True)]

        device = cache.shape.device
        self._segments = Segments.from_ranges(parts, device=device)
        self.ends = self._segments.query_ends[1:] - 1  # [rows]
        tokens = [token for row in rows for token in row.response[row.count - 1 :]]
        self.tokens = torch.tensor(tokens, device=device)  # [S]
        slots = [row.slot for row in rows]
        self._new = _places(slots, new, device)
        starts = [len(row.prompt.tokens) for row in rows]
        self.positions = _places(starts, new, device).sum(dim=0)  # [S]
        whole = [range(len(prompt.tokens)) for prompt in prompts]
        self._of_prompts = _places([prompt.slot for prompt in prompts], whole, device)
        self._of_rows = _places(slots, [range(len(row.response)) for row in rows], device)
        self._cache = cache

    def __call__(self, layer: int, heads: Tensor, *, window: int | None) -> Tensor:
        """[S, q heads + 2 kv heads, hd] of the new tokens -> [S, q heads * hd]."""
        q, new = _split(heads, self._cache.shape.kv_heads)
        prompts, rows = self._cache.prompts[layer], self._cache.rows[layer]

        (slots, columns), of_prompts, of_rows = self._new, self._of_prompts, self._of_rows
        rows[:, slots, :, columns] = new
        kept = prompts[:, of_prompts[0], :, of_prompts[1]], rows[:, of_rows[0], :, of_rows[1]]
        seen = torch.cat(kept)  # [keys, 2, kv heads, hd]
        k, v = seen.unbind(dim=1)
        return varlen_attention(q, k, v, self._segments, window=window).flatten(1)


def _places(slots: Sequence[int], columns: Sequence[range], device: torch.device) -> Tensor:
    """Return slot and column of all tokens that lie in these columns of each slot: [2, tokens]."""
    lengths = torch.tensor([len(span) for span in columns])
    column = torch.cat([torch.arange(span.start, span.stop) for span in columns])
    return torch.stack([torch.tensor(slots).repeat_interleave(lengths), column]).to(device)


class GridAttention:
    """Attention of one new token per row over its prompt and its own response, with torch alone.

    Scores over a prompt are one product for all of its rows, whose queries lie side by side on a
    grid: a line for each prompt's slot, as long as the largest group. Say that rows A, B and C have
    their prompts in slots 1, 0 and 1; an empty cell repeats the first row:

        cells    B A | A C    row_of_cell  [1, 0, 0, 2]
        rows     A B C        cell_of_row  [2, 0, 3]

    So ``x[row_of_cell]`` goes to the grid, and ``x[cell_of_row]`` comes back. With several heads of
    keys and values the same holds for each head of a row, with the queries that share it: "row"
    then means row * kv heads + head, and a line is a slot's head.

    A row's index in the step is its slot in the cache, which is so read as it lies.
    """

    def __init__(self, at: LiveRows, cache: GroupCache, *, heads: int) -> None:
        self._at, self._cache, self._heads = at, cache, heads
        self._zero = torch.zeros((), dtype=cache.shape.dtype, device=cache.shape.device)
        self._live: Sequence[Row] = ()  # as they are laid out
        self._bias: Tensor | None = None  # [n, 1, 1, P + C] 0 or -inf, of whole blocks of C
        self._biases: dict[int | None, Tensor] = {}  # this step's, by the layers' window

    @property
    def positions(self) -> Tensor:
        return self._at.positions

    def begin_step(self, live: Sequence[Row]) -> None:
        """Show each of the live rows, which ``at`` describes, its newest token."""
        if live is not self._live:
            self._lay_out(live)
        at, prompt_width = self._at, self._prompt_width
        self._longest = max(row.count for row in live)
        columns = GroupCache.rounded(self._longest)
        if self._bias is None or self._bias.shape[-1] != prompt_width + columns:
            of_prompt = length_mask(at.prompt_lengths, prompt_width)
            visible = torch.cat([of_prompt, length_mask(at.last + 1, columns)], dim=1)
            bias = torch.zeros(visible.shape, dtype=self._zero.dtype, device=visible.device)
            self._bias = bias.masked_fill_(~visible, -torch.inf)[:, None, None]
        of_response = self._bias[:, 0, 0, prompt_width:]
        of_response.index_put_((self._index, at.last), self._zero)
        self._biases = {None: self._bias[..., : prompt_width + self._longest]}
        kv = self._cache.shape.kv_heads
        shape = len(self._index) * kv, self._heads // kv, prompt_width + self._longest
        self._scores = self._bias.new_empty(shape)  # [n * kv, r, P + C], written by each layer

    def _lay_out(self, live: Sequence[Row]) -> None:
        kv, device = self._cache.shape.kv_heads, self._cache.shape.device
        slots = [row.prompt.slot for row in live]
        in_line, columns = Counter[int](), []  # a row's column is its index in its prompt's line
        for slot in slots:
            columns.append(in_line[slot])
            in_line[slot] += 1
        self._lines, self._width = kv * (max(slots) + 1), max(in_line.values())
        padding = [0] * (len(self._at.slots) - len(live))
        slot, column = torch.tensor([slots + padding, columns + padding])
        line = slot[:, None] * kv + torch.arange(kv)
        cell_of_row = (line * self._width + column[:, None]).flatten()  # [n * kv]
        row_of_cell = torch.zeros(self._lines * self._width, dtype=torch.long)
        of_live = cell_of_row[: len(live) * kv]
        row_of_cell[of_live] = torch.arange(len(of_live))
        self._index = torch.arange(len(slot), device=device)
        self._cell_of_row, self._row_of_cell = cell_of_row.to(device), row_of_cell.to(device)
        longest, room = max(len(r.prompt.tokens) for r in live), self._cache.prompts[0].shape[-2]
        # Products in bf16 copy a part of the cache, which takes longer than a little masked room.
        self._prompt_width = room if room <= 1.25 * longest else longest
        self._live, self._bias = live, None

    def _bias_within(self, window: int | None) -> Tensor:
        """Return this step's bias [n, 1, 1, P + C] for layers with a window; None: without one."""
        if window not in self._biases:
            assert window is not None
            bias, at, width = self._biases[None], self._at, self._prompt_width
            column = torch.arange(bias.shape[-1], device=bias.device)
            of_response = column - width + at.prompt_lengths[:, None]
            position = torch.where(column < width, column, of_response)  # [n, P + C]
            is_past = position <= at.positions[:, None] - window
            self._biases[window] = bias.masked_fill(is_past[:, None, None], -torch.inf)
        return self._biases[window]

    def __call__(self, layer: int, heads: Tensor, *, window: int | None) -> Tensor:
        """[n, q heads + 2 kv heads, hd] of the new tokens -> [n, q heads * hd]."""
        at, width, scores = self._at, self._prompt_width, self._scores
        n, kv, head_dim = len(heads), self._cache.shape.kv_heads, heads.shape[-1]
        q, new = _split(heads, kv)
        rows = self._cache.rows[layer]
        rows[:, at.slots, :, at.last] = new
        keys, values = rows[:, :n, :, : self._longest].flatten(1, 2)  # [n * kv, C, hd]
        prompts = self._cache.prompts[layer][..., :width, :].flatten(1, 2)
        prompt_keys, prompt_values = prompts[:, : self._lines]  # [lines, P, hd]

        q = q.unflatten(1, (kv, -1)).flatten(0, 1)  # [n * kv, r, hd]
        on_grid = q[self._row_of_cell].view(self._lines, -1, head_dim)
        on_grid = torch.bmm(on_grid, prompt_keys.mT).view(-1, q.shape[1], width)  # [cells, r, P]
        torch.index_select(on_grid, 0, self._cell_of_row, out=scores[..., :width])
        scores[..., width:] = torch.bmm(q, keys.mT)  # with out=, a strided result is slow
        by_row = scores.unflatten(0, (n, kv))
        torch.add(self._bias_within(window), by_row, alpha=head_dim**-0.5, out=by_row)
        probs = scores.softmax(dim=-1)  # in float32, whatever the scores' dtype
        on_grid = probs[..., :width][self._row_of_cell].view(self._lines, -1, width)
        on_grid = torch.bmm(on_grid, prompt_values).view(-1, q.shape[1], head_dim)
        out = on_grid.index_select(0, self._cell_of_row)  # [n * kv, r, hd]
        return out.baddbmm_(probs[..., width:], values).view(n, -1)


class KernelAttention:
    """Attention of one new token per row as one operator, which a Triton kernel computes.

    The operator takes the token's ``heads`` [n, q heads + 2 kv heads, hd], a layer's cache of
    ``prompts`` and ``rows``, and for each row its slot, its prompt's slot and length, and the index
    of the new token in its response. It caches the token's key and value, attends to the prompt,
    the response so far and the token itself, and returns [n, q heads * hd]. With a ``table``
    [T, 2, 1, hd] of rotations it first rotates queries and keys to the token's position. With a
    ``window`` it attends only to that many tokens: the new one, and those right before it.
    """

    def __init__(self, at: LiveRows, cache: GroupCache) -> None:
        self._at, self._cache = at, cache

    @property
    def positions(self) -> Tensor:
        return self._at.positions

    def begin_step(self, live: Sequence[Row]) -> None:
        """Do nothing: the kernel reads what ``at`` holds, each row's own length too."""

    def __call__(
        self, layer: int, heads: Tensor, *, window: int | None, table: Tensor | None = None
    ) -> Tensor:
        """[n, q heads + 2 kv heads, hd] of the new tokens -> [n, q heads * hd]."""
        at, of_layer = self._at, (self._cache.prompts[layer], self._cache.rows[layer])
        where = at.slots, at.prompt_slots, at.prompt_lengths, at.last, at.positions
        return _decode_attention(heads, *of_layer, *where, table, window)


# A torch operator, so that profilers and fake tensors count one operation, as a GPU does.
OPERATOR = "torchtune_grpo::decode_attention"
_ARGUMENTS = (
    "Tensor heads, Tensor prompts, Tensor(a!) rows, Tensor slots, Tensor prompt_slots, "
    "Tensor prompt_lengths, Tensor last, Tensor positions, Tensor? table, int? window"
)
torch.library.define(OPERATOR, f"({_ARGUMENTS}) -> Tensor")
_decode_attention = torch.ops.torchtune_grpo.decode_attention.default


@torch.library.impl(OPERATOR, "cuda")
def _launch(*args: Any) -> Tensor:
    from torchtune_grpo.rollout.kernel import launch

    return launch(*args)


@torch.library.register_fake(OPERATOR)
def _result(heads: Tensor, prompts: Tensor, rows: Tensor, *others: object) -> Tensor:
    return heads.new_empty(len(heads), (heads.shape[1] - 2 * rows.shape[2]) * heads.shape[2])


def missing_for_triton() -> str:
    """Say what Triton needs to build its launcher and does not find here; "" if it finds all."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    compilers = [os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")]
    missing = [] if any(compilers) else ["a C compiler"]
    missing += [] if header.exists() else [str(header)]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = f"apt-get install gcc python{version}-dev"
    return f"{' and '.join(missing)} not found; `{command}`" if missing else ""


def kernel_runs(shape: CacheShape, *, heads: int) -> bool:
    """Whether KernelAttention works here: on GPUs since Ampere, a trial run decides.

    Triton, or the C compiler and the header that it needs, may be missing.
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
        _decode_attention(new, cache, cache.clone(), *[zero] * 5, table, None)
    except Exception as error:  # Triton raises many types of its own
        why = next(iter(str(error).splitlines()), type(error).__name__)
        log.warning(
            "Rolling out without the Triton kernel and CUDA graphs, which is slower: "
            f"{missing_for_triton() or why}. Triton comes with torch for CUDA."
        )
        return False
    return True


def _split(heads: Tensor, kv: int) -> tuple[Tensor, Tensor]:
    """[K, q heads + 2 kv heads, hd] -> q [K, q heads, hd], and keys and values [K, 2, kv, hd]."""
    q, both = heads.tensor_split((heads.shape[1] - 2 * kv,), dim=1)
    return q, both.unflatten(1, (2, kv))
