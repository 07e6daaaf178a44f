"""The native engine: continuous batching over groups that share their prompt.

At most ``max_rows`` responses are worked on at once. A row that ends leaves at once, and the next
waiting one takes its place; a prompt's keys and values stay as long as one of its rows is missing.
"""

from __future__ import annotations

import heapq
import time
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from torchtune_grpo.machine.interrupt import is_interrupted
from torchtune_grpo.rollout.buffers import Buffers
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.decoder import NativeDecoder
from torchtune_grpo.rollout.graphs import StepGraphs
from torchtune_grpo.rollout.layout import RowLayout, coarse, padded_rows
from torchtune_grpo.rollout.request import Admission, Progress, RolloutRequest
from torchtune_grpo.rollout.transcript import Transcript
from torchtune_grpo.trajectory import Samples

# Prompts that are prefilled side by side have at most so many tokens; a longer one is alone.
PREFILL_TOKENS = 4096

# Steps between two looks at which rows have ended. A look makes the host wait for the device, which
# costs nothing on a CPU; on CUDA a row may sample a few tokens in vain instead.
POLL_STEPS = {"cpu": 1, "cuda": 16}

REPORT_SECONDS = 1.0


class GroupRollout:
    """One rollout: which rows are live, where, and how far.

    Args:
        decoder (NativeDecoder): the policy.
        cache (GroupCache): empty or left by an earlier rollout.
        buffers (Buffers): all else that has the size of the request.
        request (RolloutRequest): N rows.
        max_rows (int): most live rows.
        graphs (StepGraphs | None): records decoding steps and replays them.
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
        device = decoder.device
        self._decoder, self._cache, self._request, self._graphs = decoder, cache, request, graphs
        self._buffers = buffers
        self._device = device
        self._group_size = request.group_size
        self._prompt_lengths = [len(prompt) for prompt in request.prompts]
        self._longest = request.params.max_generated_tokens
        self._poll_steps = POLL_STEPS.get(device.type, 1)

        rows = request.num_rows
        self._lengths = [0] * rows  # of rows that have left
        self._truncated = [True] * rows
        self._told: set[int] = set()  # prompts whose groups have ended
        self._waiting = list(range(rows))[::-1]
        self._live: list[int] = []  # the row in each place of the cache
        self._counts: dict[int, int] = {}  # tokens of each live row
        self._max_rows = max_rows

        slots = prompt_slots(request, max_rows=max_rows)
        self._free_slots = list(range(slots))
        self._slot: dict[int, int] = {}  # of each prompt in the cache
        self._rows_left: dict[int, int] = {}  # of each prompt in the cache: rows not yet ended
        self._first_logits: dict[int, Tensor] = {}  # [V] behind each prompt with waiting rows

        self._at = RowLayout(
            buffers,
            kv_heads=cache.shape.kv_heads,
            slots=slots,
            group_size=request.group_size,
            nobody=rows,
            few_shapes=graphs is not None,
            dtype=decoder.dtype,
        )
        places = padded_rows(max_rows, few_shapes=graphs is not None)
        self._said = Transcript(request, places=places, vocab=decoder.vocab, buffers=buffers)
        prompt_width, width = max(self._prompt_lengths), 1
        if graphs is not None:  # nothing may move while the responses grow
            prompt_width = cache.rounded(prompt_width)
            width = coarse(self._longest, least=cache.BLOCK)
        cache.reserve(prompts=slots, prompt_width=prompt_width, rows=places, width=width)
        self._at.reserve(places, columns=cache.prompt_width + width)
        decoder.reserve(cache.rounded(prompt_width + self._longest))

    def run(self, *, end: float) -> Samples:
        """Works off all rows, or as many as it can until ``time.monotonic()`` is at ``end``."""
        reported = time.monotonic()
        self._check_graphs()
        while self._waiting or self._live:
            if time.monotonic() > end or is_interrupted():
                break
            if self._turn_over():
                continue  # a first token may be the last
            if not self._live:
                if self._request.admission is None or self._request.admission.is_final():
                    break
                self._wait(self._request.admission)
                continue
            for _ in range(min(self._poll_steps, self._room())):
                self._decode()
            if self._request.report and time.monotonic() - reported > REPORT_SECONDS:
                self._request.report(self._progress())
                reported = time.monotonic()
        for row in self._live:
            self._lengths[row] = self._counts[row]
        if self._request.admission is not None:
            self._end_groups(self._request.admission)
        rows = self._request.allowed_rows
        return self._said.samples(lengths=self._lengths[:rows], truncated=self._truncated[:rows])

    def _end_groups(self, admission: Admission) -> None:
        """A deadline ends all that may begin, on this rank; the others may still work."""
        while not admission.is_final() and not is_interrupted():
            for prompt in {*range(admission.allowed())} - self._told:
                self._tell(prompt)
            self._wait(admission)

    def _wait(self, admission: Admission) -> None:
        """For other groups to ask for more, or for other ranks."""
        gather = self._decoder.gather
        if gather is None or not gather.wait():
            admission.wait()

    def _tell(self, prompt: int) -> None:
        """A group has ended."""
        self._told.add(prompt)
        if self._request.admission is not None:
            rows = slice(prompt * self._group_size, (prompt + 1) * self._group_size)
            lengths, truncated = self._lengths[rows], self._truncated[rows]
            samples = self._said.samples(lengths=lengths, truncated=truncated, first=rows.start)
            self._request.admission.ended(prompt, samples)

    def _room(self) -> int:
        """Steps until the first live row is as long as a response may be."""
        return self._longest - max(self._counts.values())

    def _progress(self) -> Progress:
        tokens = sum(self._lengths) + sum(self._counts.values())
        live = len(self._live)
        finished = len(self._lengths) - live - len(self._waiting)
        rows = self._request.allowed_rows
        return Progress(tokens=tokens, finished=finished, live=live, rows=rows)

    def _turn_over(self) -> bool:
        """Lets ended rows leave and waiting ones take their places; True if any came."""
        places = self._leave()
        new = self._next_rows(self._max_rows - len(self._live) + len(places))
        if not places and not new:
            return False
        for row in new:
            if places:
                self._live[places.pop(0)] = row
            else:
                self._live.append(row)
        for place in reversed(places):  # nobody waits: the last row moves up
            last = len(self._live) - 1
            if place != last:
                self._cache.move(source=last, target=place, length=self._counts[self._live[last]])
                self._said.move(source=last, target=place)
                self._live[place] = self._live[last]
            self._live.pop()
        self._lay_out()
        if new:
            self._start(new)
        return bool(new)

    def _leave(self) -> list[int]:
        """Takes note of the rows that have ended, and returns their places, ascending."""
        if not self._live:
            return []
        left: list[int] = []
        ends = self._said.ends(
            self._at.rows[: len(self._live)],
            counts=[self._counts[row] for row in self._live],
            unseen=self._poll_steps,
        )
        places = []
        for place, (row, length) in enumerate(zip(self._live, ends, strict=True)):
            if not length and self._counts[row] < self._longest:
                continue
            self._truncated[row] = not length
            self._lengths[row] = length or self._counts[row]
            del self._counts[row]
            places.append(place)
            left.append(row)
            prompt = row // self._group_size
            self._rows_left[prompt] -= 1
            if not self._rows_left[prompt]:
                del self._rows_left[prompt]
                heapq.heappush(self._free_slots, self._slot.pop(prompt))
                self._tell(prompt)
        for place, spoilt in zip(places, self._said.spoilt(left), strict=True):
            if spoilt:
                self._cache.clear_row(place)
        return places

    def _next_rows(self, room: int) -> list[int]:
        """Takes waiting rows, and prefills the prompts that are not in the cache yet."""
        rows: list[int] = []
        prompts: list[int] = []
        allowed = self._request.allowed_rows
        while self._waiting and self._waiting[-1] < allowed and len(rows) < room:
            prompt = self._waiting[-1] // self._group_size
            if prompt not in self._slot:
                if not self._free_slots:
                    break
                self._slot[prompt] = heapq.heappop(self._free_slots)
                self._rows_left[prompt] = self._group_size
                prompts.append(prompt)
            rows.append(self._waiting.pop())
        while prompts:
            side_by_side = [prompts.pop(0)]
            tokens = self._prompt_lengths[side_by_side[0]]
            while prompts and tokens + self._prompt_lengths[prompts[0]] <= PREFILL_TOKENS:
                tokens += self._prompt_lengths[prompts[0]]
                side_by_side.append(prompts.pop(0))
            self._prefill(side_by_side)
        return rows

    def _prefill(self, prompts: list[int]) -> None:
        slots = [self._slot[prompt] for prompt in prompts]
        tokens = [list(self._request.prompts[prompt]) for prompt in prompts]
        logits = self._decoder.prefill(tokens, slots, self._cache)
        self._first_logits.update(zip(prompts, logits, strict=True))

    def _lay_out(self) -> None:
        """The live rows as tensors, anew after each change."""
        if not self._live:
            return
        prompts = [row // self._group_size for row in self._live]
        lengths = [self._prompt_lengths[prompt] for prompt in prompts]
        self._at.update(
            rows=self._live,
            slots=[self._slot[prompt] for prompt in prompts],
            counts=[self._counts.setdefault(row, 0) for row in self._live],
            prompt_lengths=lengths,
        )
        # One width for all layouts where steps are recorded.
        longest = max(lengths, default=0)
        self._prompt_width = longest if self._graphs is None else self._cache.prompt_width

    def _start(self, new: list[int]) -> None:
        """Samples the first token of new rows from what their prompts predict."""
        places = [self._live.index(row) for row in new]
        prompts = [row // self._group_size for row in new]
        logits = torch.stack([self._first_logits[prompt] for prompt in prompts])
        self._said.begin([self._request.prompts[prompt] for prompt in prompts], places=places)
        waiting = {row // self._group_size for row in self._waiting[-self._group_size :]}
        for prompt in [p for p in self._first_logits if p not in waiting]:
            del self._first_logits[prompt]
        at = torch.tensor(places, device=self._device)
        self._said.sample(logits, rows=self._at.rows[at], last=None, places=at)
        self._at.advance(at)
        for row in new:
            self._counts[row] += 1

    def _decode(self) -> None:
        longest = max(self._counts.values())
        self._cache.grow(longest)
        block = self._cache.BLOCK
        width = coarse(longest, least=block) if self._graphs else self._cache.rounded(longest)
        self._at.show(prompt_width=self._prompt_width, width=width)
        if self._graphs is None:
            self._step(width=longest)
        else:
            at, request = self._at, self._request
            self._graphs.run(
                partial(self._step, width=width),
                shape=(
                    (len(at.rows), at.used_slots, at.group_width, at.prompt_width, width),
                    (len(request.keys), request.params, tuple(request.stop_tokens)),
                ),
            )
        for row in self._live:
            self._counts[row] += 1

    def _step(self, *, width: int) -> None:
        """Feeds every live row its last token, and samples the next; no look at the device."""
        at = self._at
        tokens = self._said.tokens[at.rows, at.last]
        logits = self._decoder.decode(tokens, at, self._cache, width=width)
        self._said.sample(logits, rows=at.rows, last=at.last, places=slice(len(at.rows)))
        at.advance()

    def _check_graphs(self) -> None:
        """Graphs of another rollout are of use if all is where it was."""
        if self._graphs is not None:
            held = (self._decoder.tensors(), self._cache.tensors(), self._buffers.tensors())
            self._graphs.reads(chain.from_iterable(held))


def prompt_slots(request: RolloutRequest, *, max_rows: int) -> int:
    """Prompts in the cache at once.

    Twice as many as ``max_rows`` rows of whole groups need, so that the last rows of some groups do
    not keep the others waiting. Where a group is one row, it keeps nobody waiting.
    """
    spare = 2 if request.group_size > 1 else 1
    return min(len(request.prompts), spare * -(-max_rows // request.group_size))
