"""The native engine: its weights and memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch.distributed.fsdp import FSDPModule
from torchtune import utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import PositiveInt
from torchtune_grpo.machine.device import free_bytes, multiplies_bf16
from torchtune_grpo.machine.parallel import gathered
from torchtune_grpo.rollout.batch import GroupRollout
from torchtune_grpo.rollout.cache import CacheSize, GroupCache, padded_rows
from torchtune_grpo.rollout.decoder import NativeDecoder
from torchtune_grpo.rollout.graphs import Buffers, CudaRecorder, StepGraphs
from torchtune_grpo.rollout.request import (
    Capabilities,
    EngineContext,
    RolloutEngine,
    RolloutRequest,
    must_stop,
)
from torchtune_grpo.trajectory import Samples

log = utils.get_logger("INFO")

Merge = Literal["auto", "always", "never"]

REPLY_STEPS = 16  # a fast tool answers within so many
MEMORY_SHARE = 0.4  # share of free memory for a rollout; the update's activations need the rest
_MANY_ROWS = 256  # a quarter of them at once is enough, however many are asked for


class NativeEngine(RolloutEngine):
    """The fast engine, for models that ``unsupported_reason`` accepts; gathers sharded ones.

    ``merge_adapters`` adds LoRA to copied weights (DoRA always is); auto = if that is exact and
    fits. ``cuda_graphs`` records decoding steps and replays them, which saves kernel launches.
    The reply to a turn is due ``reply_steps`` decoding steps after its end; None = whenever it
    comes, which repeats nothing, but is faster with slow tools (docs/rollout.md).
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        merge_adapters: Merge = "auto",
        cuda_graphs: Literal["auto", "never"] = "auto",
        reply_steps: PositiveInt | None = REPLY_STEPS,
    ) -> None:
        self._model, self._settings = context.model, context.settings
        self._device, self._bytes_to_come = context.device, context.bytes_to_come
        self._merge_adapters = merge_adapters
        # With a deadline time decides, anyway.
        self._reply_steps = reply_steps if context.settings.deadline is None else None
        self._graphs: StepGraphs | None = None
        if cuda_graphs == "auto" and self._device.type == "cuda":
            self._graphs = StepGraphs(CudaRecorder())
        self._buffers = Buffers(self._device)
        self._budget: int | None = None
        self._has_warned = False
        self._decoder: NativeDecoder | None = None
        self._cache: GroupCache | None = None

    @classmethod
    def capabilities(
        cls, *, reply_steps: int | None = REPLY_STEPS, **arguments: object
    ) -> Capabilities:
        return Capabilities(turns=True, filters=True, reproducible=reply_steps is not None)

    def rows_at_once(self, request: RolloutRequest) -> int:
        """Return the number of rows of a request that are sampled at once.

        Without ``max_rows`` it is what fits into a share of the memory that was free at the first
        call, less what training will take. So the rollouts of a run are split the same way.
        """
        rows = request.num_rows
        if self._settings.max_rows is not None:
            return min(self._settings.max_rows, rows)
        if self._budget is None:
            self._budget = round(MEMORY_SHARE * self._free())
        fits = bisect_right(
            range(1, rows + 1), self._budget, key=lambda r: self.cache_bytes(request, rows=r)
        )
        if 4 * fits < min(rows, _MANY_ROWS) and not self._has_warned:
            self._has_warned = True
            needed = self.cache_bytes(request, rows=rows)
            log.warning(
                f"Rollouts sample {max(fits, 1)} of {rows} responses at once, which is slow: all "
                f"need {needed / 2**30:.2g} GiB, and {MEMORY_SHARE:.0%} of what training leaves "
                f"free is {max(self._budget, 0) / 2**30:.2g} GiB. Free memory, lower "
                "max_generated_tokens, or set rollout.max_rows, which takes what it needs."
            )
        return max(fits, 1)

    def _free(self) -> int:
        return free_bytes(self._device) - self._bytes_to_come()

    def cache_bytes(self, request: RolloutRequest, *, rows: int) -> int:
        """Return the most bytes a rollout keeps: its cache, and a step's memory, held by graphs."""
        decoder, _ = self._ready()
        size = CacheSize.of(request, max_rows=rows)
        step = decoder.step_bytes(size.prompt_width + size.width, request.params)
        return decoder.cache_shape.bytes(size) + padded_rows(rows) * step

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        stop = must_stop(self._settings.deadline)
        with self.current_weights() as (decoder, cache):
            size = CacheSize.of(request, max_rows=self.rows_at_once(request))
            graphs = self._graphs if decoder.has_kernel else None
            rollout = GroupRollout(decoder, cache, self._buffers, request, size=size, graphs=graphs)
            return rollout.run(stop, reply_steps=self._reply_steps)

    @contextmanager
    def current_weights(self) -> Iterator[tuple[NativeDecoder, GroupCache]]:
        """Yield decoder and cache, with the model's current weights, gathered if sharded."""
        with gathered(self._model):
            decoder, cache = self._ready()
            for linear in decoder.linears():
                linear.refresh()
            try:
                yield decoder, cache
            finally:  # whatever interrupts a rollout, the next one starts clean
                for linear in decoder.linears():
                    linear.release()

    def _ready(self) -> tuple[NativeDecoder, GroupCache]:
        if self._decoder is None or self._cache is None:
            merge, room = self._merge_adapters, max(self._free(), 0) / 2
            self._decoder = _make_decoder(
                self._model, merge_adapters=merge, device=self._device, room=room
            )
            self._cache = GroupCache(self._decoder.cache_shape)
        return self._decoder, self._cache


def _make_decoder(
    model: TransformerDecoder, *, merge_adapters: Merge, device: torch.device, room: float
) -> NativeDecoder:
    """Choose the dtype, and whether to merge adapters, by exactness and room for copies."""
    dtype = model.tok_embeddings.weight.dtype
    choices = [(dtype, False)]
    if dtype == torch.float32 or (device.type == "cpu" and not multiplies_bf16(device)):
        choices.insert(0, (torch.float32, True))
    move = not isinstance(model, FSDPModule)
    make = partial(NativeDecoder, model, move=move, device=device)
    for compute_dtype, merge in choices:
        if merge_adapters != "auto":
            merge = merge_adapters == "always"
        decoder = make(merge_adapters=merge, dtype=compute_dtype)
        if decoder.copied_bytes <= room:
            return decoder
    decoder = make(merge_adapters=False, dtype=dtype, room=room)
    half = f"half of the free memory is {room / 2**30:.1f} GiB"
    if not decoder.copied_bytes:
        log.warning(
            f"rollout.engine.merge_adapters=always: the merged weights do not fit, since {half}; "
            "adapters are computed beside the weights, as with never."
        )
        return decoder
    log.warning(
        f"Copies of the weights for rollouts take {decoder.copied_bytes / 2**30:.1f} GiB, and "
        f"{half}: the others are made anew for every token, which is slow. Free memory, or take a "
        "smaller model or one without quantize_base."
    )
    return decoder
