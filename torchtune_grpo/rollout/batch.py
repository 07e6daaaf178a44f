"""The native engine's rollout: continuous batching over groups that share their prompt.

At most ``max_rows`` responses are sampled at once. A row leaves as soon as it has ended, and the
next waiting row takes its place; a prompt's keys and values stay until all of its rows have ended.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from torchtune_grpo.rollout.attention import GridAttention, KernelAttention
from torchtune_grpo.rollout.cache import (
    GroupCache,
    Prompt,
    PromptGrid,
    Row,
    RowLayout,
    padded_rows,
)
from torchtune_grpo.rollout.decoder import NativeDecoder
from torchtune_grpo.rollout.graphs import Buffers, StepGraphs
from torchtune_grpo.rollout.request import Progress, RolloutRequest, StopStrings
from torchtune_grpo.rollout.sampling import Sampler, uniforms
from torchtune_grpo.trajectory import Samples

# The most prompt tokens that are prefilled side by side; a longer prompt is prefilled alone.
PREFILL_TOKENS = 4096

# Steps between two checks for ended rows. A check makes the host wait for the device: on CUDA it is
# cheaper to let a row sample a few tokens in vain.
POLL_STEPS = {"cpu": 1, "cuda": 16}

REPORT_SECONDS = 1.0


class GroupRollout:
    """One rollout: the waiting rows, the live ones with their places, and their progress.

    ``graphs``, if given, record decoding steps and replay them, which needs the decoder's kernel.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        cache: GroupCache,
        buffers: Buffers,
        request: RolloutRequest,
        *,
        max_rows: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._decoder, self._cache, self._buffers, self._graphs = decoder, cache, buffers, graphs
        self._request, self._max_rows = request, max_rows
        self._longest = request.params.max_generated_tokens
        self._poll_steps = POLL_STEPS.get(decoder.device.type, 1)

        group = request.group_size
        prompts = [Prompt(tokens, rows_left=group) for tokens in request.prompts]
        self._rows = [Row(n, prompts[n // group]) for n in range(request.num_rows)]
        self._waiting = deque(self._rows)
        self.live: list[Row] = []  # by place
        slots = prompt_slots(request, max_rows=max_rows)
        self._free_slots = list(range(slots))  # a heap

        places = padded_rows(max_rows)
        prompt_width = cache.rounded(max(len(prompt.tokens) for prompt in prompts))
        width = 1 if graphs is None else self._longest  # recorded memory must not move
        cache.reserve(prompts=slots, prompt_width=prompt_width, rows=places, width=width)
        decoder.reserve(cache.rounded(prompt_width + self._longest))
        self._grid = None if decoder.has_kernel else PromptGrid(cache.shape)
        self.layout = RowLayout(
            buffers, places=places, padding_row=len(self._rows), grid=self._grid
        )
        self.transcript = Transcript(request, places=places, vocab=decoder.vocab, buffers=buffers)

    def run(self, must_stop: Callable[[], bool]) -> Samples:
        """Sample all rows, or as much of them as possible until ``must_stop()``."""
        if self._graphs is not None:  # recorded steps are valid while no tensor moves
            held = (self._decoder.tensors(), self._cache.tensors(), self._buffers.tensors())
            self._graphs.drop_unless_at(chain.from_iterable(held))
        reported = time.monotonic()
        while (self._waiting or self.live) and not must_stop():
            if self.replace_ended() or not self.live:
                continue  # a first token may be the last
            room = self._longest - max(row.count for row in self.live)
            for _ in range(min(self._poll_steps, room)):
                self.decode()
            if self._request.report and time.monotonic() - reported > REPORT_SECONDS:
                tokens, live = sum(row.count for row in self._rows), len(self.live)
                finished, rows = len(self._rows) - live - len(self._waiting), len(self._rows)
                self._request.report(Progress(tokens, finished, live, rows))
                reported = time.monotonic()
        return self.transcript.samples(
            lengths=[row.count for row in self._rows],
            truncated=[not row.ended for row in self._rows],
        )

    def replace_ended(self) -> bool:
        """Remove ended rows and start waiting ones in their places; True if any were started."""
        places = self._remove_ended()
        new = self._next_rows(self._max_rows - len(self.live) + len(places))
        if not places and not new:
            return False
        for row in new:
            if places:
                self.live[places.pop(0)] = row
            else:
                self.live.append(row)
        for place in reversed(places):  # no row is waiting: the last live row moves up
            row = self.live.pop()
            if place < len(self.live):
                source = len(self.live)
                self._cache.move(source=source, target=place, length=row.count)
                self.transcript.move(source=source, target=place)
                self.live[place] = row
        if self.live:
            self.layout.update(self.live)
        if new:
            self._start(new)
        return bool(new)

    def _remove_ended(self) -> list[int]:
        """Find the rows that have ended, and return their places, ascending."""
        if not self.live:
            return []
        ends = self.transcript.ends(
            self.layout.rows[: len(self.live)],
            counts=[row.count for row in self.live],
            unseen=self._poll_steps,
        )
        places = []
        for place, (row, length) in enumerate(zip(self.live, ends, strict=True)):
            if not length and row.count < self._longest:
                continue
            row.ended, row.count = length > 0, length or row.count
            row.prompt.rows_left -= 1
            if not row.prompt.rows_left:
                heapq.heappush(self._free_slots, row.prompt.slot)
            places.append(place)
        non_finite = self.transcript.non_finite([self.live[place].number for place in places])
        for place, clear in zip(places, non_finite, strict=True):
            if clear:
                self._cache.clear_row(place)
        return places

    def _next_rows(self, room: int) -> list[Row]:
        """Take waiting rows, and prefill prompts that are not in the cache yet."""
        rows: list[Row] = []
        parts: list[list[Prompt]] = []  # prompts that are prefilled side by side
        tokens_left = 0
        while self._waiting and len(rows) < room:
            prompt = self._waiting[0].prompt
            if prompt.slot < 0:
                if not self._free_slots:
                    break
                prompt.slot = heapq.heappop(self._free_slots)
                if len(prompt.tokens) > tokens_left:
                    parts.append([])
                    tokens_left = PREFILL_TOKENS
                parts[-1].append(prompt)
                tokens_left -= len(prompt.tokens)
            rows.append(self._waiting.popleft())
        for part in parts:
            tokens, slots = [prompt.tokens for prompt in part], [prompt.slot for prompt in part]
            logits = self._decoder.prefill(tokens, slots, self._cache)
            for prompt, first in zip(part, logits, strict=True):
                prompt.logits = first
        return rows

    def _start(self, new: list[Row]) -> None:
        """Sample the first token of new rows from their prompts' logits."""
        places = [self.live.index(row) for row in new]
        logits = torch.stack([row.prompt.logits for row in new])
        self.transcript.begin([row.prompt.tokens for row in new], places=places)
        at = torch.tensor(places, device=self._decoder.device)
        self.transcript.sample(logits, rows=self.layout.rows[at], last=None, places=at)
        self.layout.advance(at)
        for row in new:
            row.count = 1
            if not self._waiting or self._waiting[0].prompt is not row.prompt:
                row.prompt.logits = None

    def decode(self) -> None:
        longest = max(row.count for row in self.live)
        self._cache.grow(longest)
        step, request = partial(self._step, width=longest), self._request
        if self._graphs is None:
            step()
        else:
            constants = (len(request.keys), request.params, tuple(request.stop_tokens))
            self._graphs.run(step, shape=(len(self.layout.rows), *constants))
        for row in self.live:
            row.count += 1

    def _attention(self, *, width: int) -> GridAttention | KernelAttention:
        """Return the attention of a step whose longest response has ``width`` tokens."""
        at, cache, grid = self.layout, self._cache, self._grid
        if grid is None:
            return KernelAttention(at, cache)
        prompt_width = max(len(row.prompt.tokens) for row in self.live)
        grid.show(at, prompt_width=prompt_width, width=cache.rounded(width))
        return GridAttention(at, grid, cache, width=width, heads=self._decoder.heads)

    def _step(self, *, width: int) -> None:
        """Feed every live row its last token and sample the next; never waits for the device."""
        at = self.layout
        tokens = self.transcript.tokens[at.rows, at.last]
        logits = self._decoder.decode(tokens, self._attention(width=width))
        self.transcript.sample(logits, rows=at.rows, last=at.last, places=slice(len(at.rows)))
        at.advance()


def prompt_slots(request: RolloutRequest, *, max_rows: int) -> int:
    """Return the number of prompts in the cache at once.

    It is twice what ``max_rows`` rows of whole groups need, so that new groups can start while the
    last rows of others are still running; groups of one row need no spare slots.
    """
    spare = 2 if request.group_size > 1 else 1
    return min(len(request.prompts), spare * -(-max_rows // request.group_size))


class Transcript:
    """Samples tokens and keeps them on the device: N rows, and one that all padding rows share.

    ``places`` is the largest number of rows in a step; ``tokens`` is [N + 1, max_generated_tokens].
    """

    def __init__(
        self, request: RolloutRequest, *, places: int, vocab: int, buffers: Buffers
    ) -> None:
        params, keys = request.params, request.keys.to(buffers.device)
        shape = (len(keys) + 1, params.max_generated_tokens)
        self._params = params
        self._sampler = Sampler(params, stop_tokens=request.stop_tokens, buffers=buffers)
        self._stop_tokens = frozenset(request.stop_tokens)
        self._stop_strings = None
        if params.stop_strings:
            assert request.decode is not None
            self._stop_strings = StopStrings(params.stop_strings, decode=request.decode)
        self._noise = buffers.put("noise", uniforms(torch.cat([keys, keys[:1]]), shape[1]))
        self.tokens = buffers.take("tokens", shape, dtype=torch.long)
        # Log-probs of the sampler and, where they differ, of the behaviour policy.
        kinds = 2 if params.filters or params.changes_logits or params.temperature == 0 else 1
        self._logprobs = [
            buffers.take(f"log-probs {kind}", shape, dtype=torch.float32).zero_()
            for kind in range(kinds)
        ]
        self._seen: Tensor | None = None  # [places, V]
        if params.repetition_penalty != 1:
            self._seen = buffers.take("seen", (places, vocab), dtype=torch.bool)

    def begin(self, prompts: Sequence[Sequence[int]], *, places: Sequence[int]) -> None:
        """Mark the prompts' tokens as seen by the rows that begin in these places."""
        if self._seen is not None:
            for place, prompt in zip(places, prompts, strict=True):
                self._seen[place] = False
                self._seen[place, list(prompt)] = True

    def move(self, *, source: int, target: int) -> None:
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def sample(
        self, logits: Tensor, *, rows: Tensor, last: Tensor | None, places: Tensor | slice
    ) -> None:
        """Sample the next token of n rows from logits [n, V], without waiting for the device.

        ``rows`` [n] are the row numbers, ``last`` [n] the index of each row's last token (None
        before the first), and ``places`` the rows' places in a step.
        """
        if last is None:
            at, ahead, counts = (rows, torch.zeros_like(rows)), 0, torch.zeros_like(rows)
        else:
            at, ahead, counts = (rows, last), 1, last + 1 if self._params.min_new_tokens else last
        tokens, *logprobs = self._sampler(
            logits,
            uniforms=self._noise[:, ahead:][at],
            counts=counts,
            seen=None if self._seen is None else self._seen[places],
        )
        self.tokens[:, ahead:][at] = tokens
        for kept, new in zip(self._logprobs, logprobs, strict=False):
            kept[:, ahead:][at] = new
        if self._seen is not None:
            place = torch.arange(len(self._seen), device=tokens.device)[places]
            self._seen[place, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def ends(self, rows: Tensor, *, counts: Sequence[int], unseen: int) -> list[int]:
        """Return the lengths at which rows [n] have ended, 0 for those that have not.

        ``counts`` are the rows' numbers of sampled tokens, the last ``unseen`` still unchecked.
        """
        strings = self._stop_strings
        width = min(unseen + (strings.window if strings else 0), max(counts))
        columns = torch.tensor([max(count - width, 0) for count in counts])  # first one to read
        columns = (columns[:, None] + torch.arange(width)).clamp_(max=self.tokens.shape[1] - 1)
        read = self.tokens[rows[:, None], columns.to(rows.device)].tolist()
        ends = []
        for tokens, count in zip(read, counts, strict=True):
            before = max(count - width, 0)  # tokens that were not read
            tokens = tokens[: count - before]
            start = max(count - unseen, 0)
            stops = (n for n in range(start, count) if tokens[n - before] in self._stop_tokens)
            end = next(stops, -1) + 1
            if strings is not None:
                start = max(start, self._params.min_new_tokens - 1)
                found = strings.end(tokens[: (end or count) - before], start=start - before)
                end = found + before if found else end
            ends.append(end)
        return ends

    def non_finite(self, rows: Sequence[int]) -> list[bool]:
        """Return for each row whether it has a log-prob that is not finite."""
        if not rows:  # the usual case: do not wait for the device
            return []
        index = torch.tensor(rows, dtype=torch.long, device=self.tokens.device)
        return (~self._logprobs[0][index].isfinite()).any(dim=1).tolist()

    def samples(self, *, lengths: list[int], truncated: list[bool]) -> Samples:
        """Return all rows, cut to the longest."""
        sampled = slice(len(lengths)), slice(max(1, *lengths))  # [N, L]
        logprobs = [kept[sampled].clone() for kept in self._logprobs]
        return Samples(
            responses=self.tokens[sampled].clone(),
            lengths=torch.tensor(lengths, device=self.tokens.device),
            truncated=torch.tensor(truncated, device=self.tokens.device),
            sampler_logprobs=logprobs[0],
            behaviour_logprobs=logprobs[-1],
        )
