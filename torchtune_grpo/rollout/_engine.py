"""The native engine, and the choice between it and torchtune's generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torchtune import utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.memory import fits_every_rank, free_bytes
from torchtune_grpo.rollout._cache import GroupCache
from torchtune_grpo.rollout._decoder import NativeDecoder, unsupported_reason
from torchtune_grpo.rollout._gather import LayerGather, gathered
from torchtune_grpo.rollout._graphs import StepGraphs, record_cuda_graph
from torchtune_grpo.rollout._layout import padded_rows
from torchtune_grpo.rollout._native import GroupRollout, live_rows, prompt_slots
from torchtune_grpo.rollout._params import RolloutConfig
from torchtune_grpo.rollout._request import RolloutEngine, RolloutRequest, end_of_rollout
from torchtune_grpo.rollout._torchtune import TorchtuneEngine
from torchtune_grpo.trajectory import Samples

log = utils.get_logger("INFO")


def make_engine(
    model: TransformerDecoder,
    settings: RolloutConfig,
    *,
    gather: str = "auto",
    is_sharded: bool = False,
) -> RolloutEngine:
    """The engine that the config asks for, or torchtune's for a model that ours does not know.

    Args:
        model (TransformerDecoder): the policy, not yet compiled or wrapped.
        settings (RolloutConfig): the config's keys below ``rollout``.
        gather (str): see :class:`NativeEngine`.
        is_sharded (bool): the model will be sharded over ranks.

    Returns:
        RolloutEngine: reads the model's current weights at every call.

    Raises:
        ValueError: if the engine cannot run a sharded model.
    """
    if settings.engine == "native":
        reason = unsupported_reason(model)
        if reason is None:
            return NativeEngine(model, settings, gather=gather)
        log.warning(f"rollout.engine=native: {reason}; generating with torchtune's own modules.")
    if is_sharded:  # it would gather every layer for every token, in step with the other ranks
        raise ValueError(
            "rollout.engine=torchtune: cannot run a sharded model; set distributed.sharding=never."
        )
    return TorchtuneEngine(model, settings)


class NativeEngine:
    """The fast engine, for every model that :func:`unsupported_reason` finds nothing in.

    Args:
        model (TransformerDecoder): the policy.
        settings (RolloutConfig): the config's keys below ``rollout``; ``engine`` does not matter
            here, and ``cuda_graphs`` does nothing with gather "layer".
        gather (str): a model that is sharded by then is gathered "once" for a whole rollout, or
            "layer" by layer for every token of all ranks; "auto" decides by memory.

    Raises:
        ValueError: if the model is not one that the engine can run.
    """

    def __init__(
        self, model: TransformerDecoder, settings: RolloutConfig, *, gather: str = "auto"
    ) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"rollout.engine=native: {reason}; set rollout.engine to torchtune.")
        self._model, self._settings, self._gather = model, settings, gather
        self._record_step = record_cuda_graph if settings.cuda_graphs else None
        self._decoder: NativeDecoder | None = None
        self._cache: GroupCache | None = None

    def cache_bytes(self, request: RolloutRequest) -> int:
        """The most that the cache of a rollout takes, known before the first token."""
        decoder, _ = self._ready()
        rows = live_rows(request, max_rows=self._settings.max_rows)
        return decoder.cache_shape.bytes(
            prompts=prompt_slots(request, max_rows=rows),
            prompt_width=max(map(len, request.prompts)),
            rows=padded_rows(rows),
            response_width=GroupCache.rounded(request.params.max_generated_tokens),
        )

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        """See :meth:`RolloutEngine.generate`."""
        end = end_of_rollout(self._settings.deadline)
        record = None if self._by_layer else self._record_step
        with self._current_weights() as (decoder, cache):
            graphs = None if record is None else StepGraphs(record)
            rows = self._settings.max_rows
            return GroupRollout(decoder, cache, request, max_rows=rows, graphs=graphs).run(end=end)

    @contextmanager
    def _current_weights(self) -> Iterator[tuple[NativeDecoder, GroupCache]]:
        with gathered(self._model, layers=not self._by_layer):
            decoder, cache = self._ready()
            decoder.gather = LayerGather(self._model) if self._by_layer else None
            for linear in decoder.linears():
                linear.refresh()
            try:
                yield decoder, cache
                if decoder.gather is not None:
                    decoder.gather.finish()
            finally:  # whatever interrupts a rollout, the next one starts clean
                for linear in decoder.linears():
                    linear.release()

    @property
    def _by_layer(self) -> bool:
        is_sharded = isinstance(self._model, FSDPModule)
        if is_sharded and self._gather == "auto":
            device = next(self._model.parameters()).device
            self._gather = "once" if fits_every_rank(self._model, device=device) else "layer"
        return is_sharded and self._gather == "layer"

    def _ready(self) -> tuple[NativeDecoder, GroupCache]:
        if self._decoder is None or self._cache is None:
            merge = self._settings.merge_adapters
            self._decoder = _make_decoder(
                self._model, merge_adapters=merge, may_copy=not self._by_layer
            )
            self._cache = GroupCache(self._decoder.cache_shape)
        return self._decoder, self._cache


def _make_decoder(
    model: TransformerDecoder, *, merge_adapters: str, may_copy: bool
) -> NativeDecoder:
    """Chooses what to compute in, and whether adapters are merged, by exactness and memory."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    dtype = model.tok_embeddings.weight.dtype
    free = free_bytes(parameter.device) / 2
    choices = [(dtype, False)]
    if dtype == torch.float32 or (parameter.device.type == "cpu" and not _has_fast_bf16()):
        choices.insert(0, (torch.float32, True))
    for compute_dtype, merge in choices if may_copy else []:
        if merge_adapters != "auto":
            merge = merge_adapters == "always"
        decoder = NativeDecoder(model, merge_adapters=merge, dtype=compute_dtype)
        copies = sum(linear.copied_bytes for linear in decoder.linears())
        if copies < free:
            return decoder
    return NativeDecoder(model, merge_adapters=False, dtype=dtype, copy=False)


def _has_fast_bf16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.12 or so
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
