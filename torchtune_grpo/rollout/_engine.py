"""Rollout engines: one interface over the native engine and torchtune's generation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torchtune import utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.memory import fits_every_rank, free_bytes
from torchtune_grpo.rollout._cache import GroupCache
from torchtune_grpo.rollout._decoder import NativeDecoder, unsupported_reason
from torchtune_grpo.rollout._gather import LayerGather, gathered, is_sharded
from torchtune_grpo.rollout._graphs import StepGraphs, record_cuda_graph
from torchtune_grpo.rollout._layout import padded_rows
from torchtune_grpo.rollout._native import GroupRollout, prompt_slots
from torchtune_grpo.rollout._params import Progress, SamplingParams
from torchtune_grpo.rollout._stop_strings import Decode, stop_strings_of
from torchtune_grpo.rollout._torchtune import TorchtuneEngine
from torchtune_grpo.trajectory import Samples

if TYPE_CHECKING:
    from torchtune_grpo.config import RolloutConfig

log = utils.get_logger("INFO")

ENGINES = ("native", "torchtune")
MERGE_CHOICES = ("auto", "always", "never")
GATHER_CHOICES = ("auto", "once", "layer")


def make_engine(
    model: TransformerDecoder,
    settings: RolloutConfig,
    *,
    max_rows: int,
    sharded: bool = False,
) -> RolloutEngine:
    """The engine that the config asks for, or torchtune's for a model that ours does not know.

    Args:
        model (TransformerDecoder): the policy, not yet compiled or wrapped.
        settings (RolloutConfig): the config's keys below ``rollout``.
        max_rows (int): most responses that are worked on at once.
        sharded (bool): the model will be sharded over ranks.

    Returns:
        RolloutEngine: reads the model's current weights at every call.

    Raises:
        ValueError: if the engine cannot run a sharded model.
    """
    if settings.engine == "native":
        reason = unsupported_reason(model)
        if reason is None:
            return NativeEngine(
                model,
                max_rows=max_rows,
                merge_adapters=settings.merge_adapters,
                deadline=settings.deadline,
                gather=settings.gather,
                cuda_graphs=settings.cuda_graphs,
            )
        log.warning(f"rollout.engine=native: {reason}; generating with torchtune's own modules.")
    if sharded:  # it would gather every layer for every token, in step with the other ranks
        raise ValueError(
            "rollout.engine=torchtune: cannot run a sharded model; set sharding=never."
        )
    return TorchtuneEngine(model, max_rows=max_rows, deadline=settings.deadline)


class RolloutEngine(Protocol):
    """Samples a group of responses for each prompt."""

    def generate(
        self,
        prompts: PromptBatch,
        *,
        group_size: int,
        params: SamplingParams,
        stop_tokens: Sequence[int],
        keys: Tensor,
        decode: Decode | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> Samples:
        """Samples ``group_size`` responses for each prompt with the policy's current weights.

        Args:
            prompts (PromptBatch): B left-padded prompts on the model's device.
            group_size (int): G.
            params (SamplingParams): temperature, filters, length.
            stop_tokens (Sequence[int]): a response ends with the first of these.
            keys (Tensor): [B*G] of the noise, see :func:`torchtune_grpo.rollout.row_keys`. A
                response depends on its prompt, its key and the policy, and on nothing else.
            decode (Decode | None): token ids to text; needed for ``params.stop_strings``.
            report (Callable[[Progress], None] | None): told of the progress now and then.

        Returns:
            Samples: N = B*G rows, prompt-major.
        """
        ...


class NativeEngine:
    """The fast engine, for every model that :func:`unsupported_reason` finds nothing in.

    Args:
        model (TransformerDecoder): the policy.
        max_rows (int): most responses that are worked on at once.
        merge_adapters (str): "always" and "never" merge adapters into a copy of the weights or
            not; "auto" does where it is exact (float32) and memory allows.
        deadline (float | None): seconds after which a rollout cuts its rows where they are.
        gather (str): a model that is sharded by then is gathered "once" for a whole rollout, or
            "layer" by layer for every token of all ranks; "auto" decides by memory.
        cuda_graphs (bool): record decoding steps and replay them; not for gather "layer".

    Raises:
        ValueError: if the model is not one that the engine can run.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        *,
        max_rows: int,
        merge_adapters: str = "auto",
        deadline: float | None = None,
        gather: str = "auto",
        cuda_graphs: bool = False,
    ) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"rollout.engine=native: {reason}; set rollout.engine to torchtune.")
        self._model = model
        self._max_rows = max_rows
        self._merge_adapters = merge_adapters
        self._deadline = deadline
        self._gather = gather
        self._record_step = record_cuda_graph if cuda_graphs else None
        self._decoder: NativeDecoder | None = None
        self._cache: GroupCache | None = None

    def cache_bytes(self, prompts: PromptBatch, *, group_size: int, params: SamplingParams) -> int:
        """The most that the cache of a rollout takes, known before the first token."""
        decoder, _ = self._ready()
        count = len(prompts.lengths)
        return decoder.cache_shape.bytes(
            prompts=prompt_slots(prompts=count, group_size=group_size, max_rows=self._max_rows),
            prompt_width=int(prompts.lengths.max()),
            rows=padded_rows(min(self._max_rows, count * group_size)),
            response_width=GroupCache.rounded(params.max_generated_tokens),
        )

    @torch.no_grad()
    def generate(
        self,
        prompts: PromptBatch,
        *,
        group_size: int,
        params: SamplingParams,
        stop_tokens: Sequence[int],
        keys: Tensor,
        decode: Decode | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> Samples:
        """See :meth:`RolloutEngine.generate`."""
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        record = None if self._by_layer else self._record_step
        with self._current_weights() as (decoder, cache):
            return GroupRollout(
                decoder,
                cache,
                prompts,
                group_size=group_size,
                params=params,
                stop_tokens=stop_tokens,
                stop_strings=stop_strings_of(params, decode),
                keys=keys,
                max_rows=self._max_rows,
                graphs=None if record is None else StepGraphs(record),
            ).run(out_of_time=lambda: time.monotonic() > end, report=report)

    @contextmanager
    def _current_weights(self) -> Iterator[tuple[NativeDecoder, GroupCache]]:
        with gathered(self._model, layers=not self._by_layer):
            decoder, cache = self._ready()
            decoder.gather = LayerGather(self._model) if self._by_layer else None
            for projection in decoder.projections():
                projection.refresh()
            try:
                yield decoder, cache
                if decoder.gather is not None:
                    decoder.gather.finish()
            finally:  # whatever interrupts a rollout, the next one starts clean
                for projection in decoder.projections():
                    projection.release()

    @property
    def _by_layer(self) -> bool:
        if not is_sharded(self._model):
            return False
        if self._gather == "auto":
            device = next(self._model.parameters()).device
            self._gather = "once" if fits_every_rank(self._model, device=device) else "layer"
        return self._gather == "layer"

    def _ready(self) -> tuple[NativeDecoder, GroupCache]:
        if self._decoder is None or self._cache is None:
            if self._by_layer:  # no room for copies
                dtype = self._model.tok_embeddings.weight.dtype
                self._decoder = NativeDecoder(
                    self._model, merge_adapters=False, dtype=dtype, copy=False
                )
            else:
                self._decoder = _make_decoder(self._model, merge_adapters=self._merge_adapters)
            self._cache = GroupCache(self._decoder.cache_shape)
        return self._decoder, self._cache


def _make_decoder(model: TransformerDecoder, *, merge_adapters: str) -> NativeDecoder:
    """Chooses what to compute in, and whether adapters are merged, by exactness and memory."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    dtype = model.tok_embeddings.weight.dtype
    free = free_bytes(parameter.device) / 2
    choices = [(dtype, False)]
    if dtype == torch.float32 or (parameter.device.type == "cpu" and not _has_fast_bf16()):
        choices.insert(0, (torch.float32, True))
    for compute_dtype, merge in choices:
        if merge_adapters != "auto":
            merge = merge_adapters == "always"
        decoder = NativeDecoder(model, merge_adapters=merge, dtype=compute_dtype)
        copies = sum(projection.copied_bytes for projection in decoder.projections())
        if copies < free:
            return decoder
    return NativeDecoder(model, merge_adapters=False, dtype=dtype, copy=False)


def _has_fast_bf16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.12 or so
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
