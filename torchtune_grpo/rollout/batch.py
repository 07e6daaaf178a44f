"""The native engine's rollout: continuous batching over groups that share their prompt.

At most ``max_rows`` responses are sampled at once. A row leaves as soon as it has ended, and the
next waiting row takes its slot; a prompt's keys and values stay until all of its rows have ended.
With turns, a row also leaves at the end of each, but keeps its slot. Rows that have a reply take
the next free places together.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from torchtune_grpo.machine.segments import fill_parts, shared_beginning
from torchtune_grpo.rollout.attention import (
    GridAttention,
    KernelAttention,
    PromptAttention,
    ReplyAttention,
)
from torchtune_grpo.rollout.cache import CachedPrompt, CacheSize, GroupCache, LiveRows, Row
from torchtune_grpo.rollout.decoder import NativeDecoder
from torchtune_grpo.rollout.graphs import Buffers, StepGraphs
from torchtune_grpo.rollout.paused import PausedRows
from torchtune_grpo.rollout.request import Progress, RolloutRequest
from torchtune_grpo.rollout.sampling import Sampler, filters_in, uniforms
from torchtune_grpo.trajectory import Samples, length_mask

# The most tokens of prompts or replies that are fed side by side; a longer one is fed alone.
PREFILL_TOKENS = 4096
KEYS_PER_TOKEN = 16  # so many keys of tokens that are not fed again count as one token

# Steps between two checks for ended rows. A check makes the host wait for the device: on CUDA it is
# cheaper to let a row sample a few tokens in vain.
POLL_STEPS = {"cpu": 1, "cuda": 16}

REPORT_SECONDS = 1.0


class GroupRollout:
    """One rollout: its waiting rows, its live and paused ones, and their slots in the cache.

    ``graphs``, if given, record decoding steps and replay them, which needs the decoder's kernel.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        cache: GroupCache,
        buffers: Buffers,
        request: RolloutRequest,
        *,
        size: CacheSize,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._decoder, self._cache, self._buffers, self._graphs = decoder, cache, buffers, graphs
        self._request, self._max_rows = request, size.max_rows
        self._poll_steps = POLL_STEPS.get(decoder.device.type, 1)

        group = request.group_size
        prompts = [CachedPrompt(tokens, rows_left=group) for tokens in request.prompts]
        self._rows = [Row(n, prompts[n // group]) for n in range(request.num_rows)]
        self._waiting = deque(self._rows)
        self.live: list[Row] = []  # in the order of their slots
        self._paused = PausedRows(request.turns)
        self._shared = shared_beginning(request.prompts)  # tokens
        self._steps = 0
        self._has_gaps = False  # left by live rows that have ended since the last layout
        self._free_slots = list(range(size.slots))  # a heap, as is the next
        self._free_prompt_slots = list(range(size.prompts))

        # Memory that is recorded must not move; other responses grow.
        cache.reserve(size if graphs is not None else replace(size, width=cache.BLOCK))
        decoder.reserve(size.prompt_width + size.width)
        padding = Row(len(self._rows), prompts[0], slot=size.slots)
        self.layout = LiveRows(buffers, size=size, padding_row=padding)
        self._attention: GridAttention | KernelAttention
        if decoder.has_kernel:
            self._attention = KernelAttention(self.layout, cache)
        else:
            self._attention = GridAttention(self.layout, cache, heads=decoder.heads)
        self.transcript = Transcript(request, slots=size.rows, vocab=decoder.vocab, buffers=buffers)

    def run(self, must_stop: Callable[[], bool], *, reply_steps: int | None = None) -> Samples:
        """Sample all rows, or as much of them as possible until ``must_stop()``.

        A reply is due ``reply_steps`` decoding steps after a turn's end; None: whenever it comes.
        """
        self._paused.steps = reply_steps
        if self._graphs is not None:  # recorded steps are valid while no tensor moves
            held = (self._decoder.tensors(), self._cache.tensors(), self._buffers.tensors())
            self._graphs.drop_unless_at(chain.from_iterable(held))
        reported = time.monotonic()
        while (self._waiting or self.live or self._paused.rows) and not must_stop():
            if self.replace_ended() or not self.live:
                continue  # a first token may be the last
            for _ in range(min(self._poll_steps, *(row.room(self._request) for row in self.live))):
                self.decode()
            if self._request.report and time.monotonic() - reported > REPORT_SECONDS:
                tokens = sum(row.count for row in self._rows)
                rows, live = len(self._rows), len(self.live)
                finished = rows - live - len(self._waiting) - len(self._paused.rows)
                self._request.report(Progress(tokens, finished, live, rows))
                reported = time.monotonic()
        self._remove_ended()  # since the last look, if it must stop
        self._free([*self.live, *self._paused.rows.values()])
        for row in self._paused.rows.values():  # without its reply
            row.ended = False
        return self.transcript.samples(self._rows)

    def replace_ended(self) -> bool:
        """Remove ended rows; answered and waiting ones take their places.

        True if any do, or if replies that are due have not come.
        """
        is_idle = not self.live  # nothing could be started the last time
        ended, answered = self._remove_ended(), self._next_turns(is_idle)
        self._has_gaps |= bool(ended)
        if answered is None:  # no slot changes hands before all of them have come
            if ended and self.live:
                self.layout.update(self.live)
            return True
        new = self._next_rows(self._max_rows - len(self.live) - len(answered))
        if not self._has_gaps and not answered and not new:
            return False
        self._has_gaps = False
        self.live = sorted([*self.live, *answered, *new], key=lambda row: row.slot)
        if not self._decoder.has_kernel:
            self._close_gaps()
        if answered:
            self._sample_after_replies(answered)
        if new:
            self._sample_first(new)
        if self.live:
            self.layout.update(self.live)
        return bool(answered or new)

    def _remove_ended(self) -> list[Row]:
        """Take the rows that have ended, or their turns, out of the live ones."""
        if not self.live:
            return []
        numbers = self.layout.numbers[: len(self.live)]
        ends = self.transcript.ends(self.live, numbers, unseen=self._poll_steps)
        ended = []
        for row, length in zip(self.live, ends, strict=True):
            if length or not row.room(self._request):
                row.ended, row.count = length > 0, length or row.count
                ended.append(row)
        for row in ended:
            if self._request.turns is not None and row.ended:
                row.response = self.transcript.tokens[row.number, : row.count].tolist()
                self._paused.add(row, now=self._steps)
        self._free([row for row in ended if row.number not in self._paused.rows])
        if ended:  # the same list is what attention has laid out already
            self.live = [row for row in self.live if row not in ended]
        return ended

    def _free(self, rows: Sequence[Row]) -> None:
        """Free the slots of rows that are over, and those of prompts whose last ones they are."""
        non_finite = self.transcript.non_finite([row.number for row in rows])
        for row, clear in zip(rows, non_finite, strict=True):
            if clear:
                self._cache.clear_row(row.slot)
            heapq.heappush(self._free_slots, row.slot)
            row.prompt.rows_left -= 1
            if not row.prompt.rows_left:
                heapq.heappush(self._free_prompt_slots, row.prompt.slot)

    def _next_turns(self, is_idle: bool) -> list[Row] | None:
        """Return the rows that go on with a reply, after freeing those whose replies are empty.

        None: a reply that is due has not come.
        """
        replies = self._paused.answered(now=self._steps, live=len(self.live), is_idle=is_idle)
        if replies is None:
            return None
        self._free([self._paused.pop(number) for number, reply in replies.items() if not reply])
        going = [number for number, reply in replies.items() if reply]
        rows = [self._paused.pop(number) for number in going[: self._max_rows - len(self.live)]]
        for row in rows:
            fits = row.room(self._request) and len(row.response) < self._request.max_row_tokens
            assert fits, "a reply leaves at least one token to sample"
        return rows

    def _next_rows(self, places: int) -> list[Row]:
        """Give slots to waiting rows, and prefill prompts that are not in the cache yet."""
        rows: list[Row] = []
        prompts: list[CachedPrompt] = []
        if not self._may_start(places):
            return []
        while self._waiting and self._free_slots and len(rows) < places:
            prompt = self._waiting[0].prompt
            if prompt.slot < 0:
                if not self._free_prompt_slots:
                    break
                prompt.slot = heapq.heappop(self._free_prompt_slots)
                prompts.append(prompt)
            rows.append(self._waiting.popleft())
            rows[-1].slot = heapq.heappop(self._free_slots)
        shared = self._shared
        own = shared // KEYS_PER_TOKEN - shared  # of the beginning, each has the keys alone
        room = PREFILL_TOKENS - shared
        for part in fill_parts(prompts, size=lambda prompt: len(prompt.tokens) + own, room=room):
            logits = self._decoder.feed(PromptAttention(part, self._cache))
            for prompt, first in zip(part, logits, strict=True):
                prompt.logits = first
        return rows

    def _may_start(self, places: int) -> bool:
        """Whether enough rows wait to compute the beginning that all prompts share once more.

        Few-shot examples, say, are most of each prompt, and are computed once for all that start
        together. So prompts start in numbers, but no more than a quarter of the places stay empty.
        """
        new = {row.prompt for row in islice(self._waiting, places) if row.prompt.slot < 0}
        rest = sum(len(prompt.tokens) - self._shared for prompt in new)
        return not (new and self.live) or rest >= self._shared or 4 * places >= self._max_rows

    def _close_gaps(self) -> None:
        """Move the last rows to slots before them, which are free or of rows that pause.

        If index and slot are the same for all rows, torch's operators read the cache as it lies.
        """
        gaps = sorted({*range(len(self.live))} - {row.slot for row in self.live})
        paused = {row.slot: row for row in self._paused.rows.values()}
        for row, slot in zip(reversed(self.live), reversed(gaps), strict=False):
            other = paused.get(slot)
            # With what a row has sampled in vain: it may not be finite.
            length = max(row.count, other.count if other else 0) + self._poll_steps
            self._cache.swap(row.slot, slot, length=length)
            self.transcript.swap(row.slot, slot)
            if other is None:
                self._free_slots[self._free_slots.index(slot)] = row.slot
            else:
                other.slot = row.slot
            row.slot = slot
        if gaps:
            heapq.heapify(self._free_slots)
            self.live.sort(key=lambda row: row.slot)

    def _sample_after_replies(self, answered: Sequence[Row]) -> None:
        """Feed answered rows their replies, and sample the first token of their next turns."""

        def tokens(row: Row) -> int:
            keys = len(row.prompt.tokens) + len(row.response)
            return len(row.response) - row.count + 1 + keys // KEYS_PER_TOKEN

        self._cache.grow(max(len(row.response) for row in answered))
        for rows in fill_parts(answered, size=tokens, room=PREFILL_TOKENS):
            self.transcript.give(rows)
            logits = self._decoder.feed(ReplyAttention(rows, self._cache))
            for row in rows:
                row.begin_turn()
            self.transcript.sample_next(rows, logits)

    def _sample_first(self, new: Sequence[Row]) -> None:
        """Sample the first token of new rows from their prompts' logits."""
        self.transcript.begin(new)
        self.transcript.sample_next(new, torch.stack([row.prompt.logits for row in new]))
        for row in new:
            if not self._waiting or self._waiting[0].prompt is not row.prompt:
                row.prompt.logits = None

    def decode(self) -> None:
        """Sample the next token of every live row, in a step that may be replayed."""
        self._cache.grow(max(row.count for row in self.live))
        if self._graphs is None:
            self._step()
        else:
            rows, request = len(self.layout.numbers), self._request
            constants = request.params, request.row_limit, request.vocab_size
            shape = rows, len(request.keys), tuple(request.stop_tokens), *constants
            self._graphs.run(self._step, shape=shape)
        self._steps += 1
        for row in self.live:
            row.count += 1

    def _step(self) -> None:
        """Feed every live row its last token and sample the next; never waits for the device."""
        at = self.layout
        self._attention.begin_step(self.live)
        tokens = self.transcript.tokens[at.numbers, at.last]
        logits = self._decoder.decode(tokens, self._attention)
        self.transcript.sample(logits, numbers=at.numbers, last=at.last, slots=at.slots)
        at.advance()


class Transcript:
    """Samples tokens and keeps them on the device: N rows, and one that all padding rows share.

    ``tokens`` is [N + 1, the most tokens of a response]; a row's ``slot`` is below ``slots``.
    """

    def __init__(
        self, request: RolloutRequest, *, slots: int, vocab: int, buffers: Buffers
    ) -> None:
        params, keys = request.params, request.keys.to(buffers.device)
        shape = (len(keys) + 1, request.max_row_tokens)
        self.params = params
        known = min(request.vocab_size or vocab, vocab)
        self._sampler = Sampler(
            params, stop_tokens=request.stop_tokens, vocab_size=known, buffers=buffers
        )
        self._stop_tokens = frozenset(request.stop_tokens)
        self._stop_strings = request.stop_strings
        self._noise = buffers.put("noise", uniforms(torch.cat([keys, keys[:1]]), shape[1]))
        self.tokens = buffers.take("tokens", shape, dtype=torch.long)
        # Log-probs of the sampler and, where they differ, of the behaviour policy.
        differ = filters_in(dict(params)) or params.temperature == 0 or known < vocab
        kinds = 2 if differ else 1
        self._logprobs = [
            buffers.take(f"log-probs {kind}", shape, dtype=torch.float32).zero_()
            for kind in range(kinds)
        ]
        self._given = torch.zeros(shape, dtype=torch.bool, device=buffers.device)
        self._seen: Tensor | None = None  # [slots, V]
        if params.repetition_penalty != 1:
            self._seen = buffers.take("seen", (slots, vocab), dtype=torch.bool)

    def begin(self, rows: Sequence[Row]) -> None:
        """Mark the tokens of rows, and no others, as seen in their slots."""
        if self._seen is not None:
            for row in rows:
                self._seen[row.slot] = False
                self._seen[row.slot, [*row.prompt.tokens, *row.response]] = True

    def give(self, rows: Sequence[Row]) -> None:
        """Write rows' replies after what they have sampled; their tokens count as seen."""
        new = [
            [row.number, n, row.response[n]]
            for row in rows
            for n in range(row.count, len(row.response))
        ]
        numbers, columns, tokens = torch.tensor(new, device=self.tokens.device).t()
        at = numbers, columns
        self.tokens[at] = tokens
        self._given[at] = True
        for kept in self._logprobs:
            kept[at] = 0
        self.begin(rows)

    def swap(self, one: int, other: int) -> None:
        if self._seen is not None:
            self._seen[[one, other]] = self._seen[[other, one]]

    def sample_next(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Sample the next token of rows, none or all of which have begun, from logits [n, V]."""
        where = [[row.number, row.slot, row.count - 1] for row in rows]
        numbers, slots, last = torch.tensor(where, device=logits.device).t()
        has_begun = rows[0].count > 0
        self.sample(logits, numbers=numbers, last=last if has_begun else None, slots=slots)
        for row in rows:
            row.count += 1

    def sample(
        self, logits: Tensor, *, numbers: Tensor, last: Tensor | None, slots: Tensor
    ) -> None:
        """Sample the next token of n rows from logits [n, V], without waiting for the device.

        ``numbers`` [n] and ``slots`` [n] are the rows', and ``last`` [n] is the index of each one's
        last token; None before the first.
        """
        if last is None:
            at, ahead, counts = (numbers, torch.zeros_like(numbers)), 0, torch.zeros_like(numbers)
        else:
            at, ahead = (numbers, last), 1
            counts = last + 1 if self.params.min_new_tokens else last
        tokens, *logprobs = self._sampler(
            logits,
            uniforms=self._noise[:, ahead:][at],
            counts=counts,
            seen=None if self._seen is None else self._seen[slots],
        )
        self.tokens[:, ahead:][at] = tokens
        for kept, new in zip(self._logprobs, logprobs, strict=False):
            kept[:, ahead:][at] = new
        if self._seen is not None:
            self._seen[slots, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def ends(self, rows: Sequence[Row], numbers: Tensor, *, unseen: int) -> list[int]:
        """Return the lengths at which the turns of rows have ended, 0 for those that go on.

        ``numbers`` [n] are the rows', whose last ``unseen`` tokens are still unchecked.
        """
        window = 0 if self._stop_strings is None else self._stop_strings.window
        width = min(unseen + window, max(row.count for row in rows))
        firsts = [max(row.count - width, row.begin) for row in rows]
        columns = torch.tensor(firsts)[:, None] + torch.arange(width)
        columns = columns.clamp_(max=self.tokens.shape[1] - 1).to(numbers.device)
        read = self.tokens[numbers[:, None], columns].tolist()
        new = [range(max(row.count - unseen, n), row.count) for row, n in zip(rows, firsts)]
        return [self._end(*row) for row in zip(read, firsts, new, strict=True)]

    def _end(self, tokens: Sequence[int], first: int, new: range) -> int:
        """Return the length of a response up to its turn's end; 0 without one.

        ``tokens`` are its tokens from index ``first`` on, and it may end with those at ``new``.
        """
        length = next((n + 1 for n in new if tokens[n - first] in self._stop_tokens), 0)
        if self._stop_strings is None:
            return length
        read = tokens[: (length or new.stop) - first]
        start = max(new.start, self.params.min_new_tokens - 1)
        end = self._stop_strings.end(read, start=start - first)
        return length if end is None else first + end

    def non_finite(self, numbers: Sequence[int]) -> list[bool]:
        """Return for each row whether it has a log-prob that is not finite."""
        if not numbers:  # the usual case: do not wait for the device
            return []
        index = torch.tensor(numbers, device=self.tokens.device)
        return (~self._logprobs[0][index].isfinite()).any(dim=1).tolist()

    def samples(self, rows: Sequence[Row]) -> Samples:
        """Return all rows, cut to the longest; those that have not ended are truncated."""
        lengths = torch.tensor([row.count for row in rows], device=self.tokens.device)
        truncated = torch.tensor([not row.ended for row in rows], device=self.tokens.device)
        sampled = slice(len(rows)), slice(max(1, *(row.count for row in rows)))  # [N, L]
        responses = self.tokens[sampled].clone()
        logprobs = [kept[sampled].clone() for kept in self._logprobs]
        of_response = length_mask(lengths, responses.shape[1])
        return Samples(
            responses=responses,
            lengths=lengths,
            sampled=of_response & ~self._given[sampled],
            truncated=truncated,
            sampler_logprobs=logprobs[0],
            behaviour_logprobs=logprobs[-1],
        )
