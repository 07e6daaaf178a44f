"""The native engine, and the choice between it and torchtune's generation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torchtune import utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine.device import fits_every_rank, free_bytes
from torchtune_grpo.rollout.buffers import Buffers
from torchtune_grpo.rollout.cache import GroupCache
from torchtune_grpo.rollout.decoder import NativeDecoder, unsupported_reason
from torchtune_grpo.rollout.gather import LayerGather, gathered
from torchtune_grpo.rollout.graphs import CudaRecorder, StepGraphs
from torchtune_grpo.rollout.layout import coarse, padded_rows
from torchtune_grpo.rollout.native import GroupRollout, prompt_slots
from torchtune_grpo.rollout.request import RolloutEngine, RolloutRequest, end_of_rollout
from torchtune_grpo.rollout.torchtune import TorchtuneEngine
from torchtune_grpo.trajectory import Samples

log = utils.get_logger("INFO")

# Of the free memory, what a rollout may keep; the update needs the rest.
_SHARE = 0.4


def make_engine(
    model: TransformerDecoder,
    settings: RolloutConfig,
    *,
    gather: str = "auto",
    is_sharded: bool = False,
    device: torch.device | None = None,
) -> RolloutEngine:
    """The engine that the config asks for, or torchtune's for a model that ours does not know.

    Args:
        model (TransformerDecoder): the policy, not yet compiled or wrapped.
        settings (RolloutConfig): the config's keys below ``rollout``.
        gather (str): see :class:`NativeEngine`.
        is_sharded (bool): the model will be sharded over ranks.
        device (torch.device | None): where to compute; None = where the model is.

    Returns:
        RolloutEngine: reads the model's current weights at every call.

    Raises:
        ValueError: if the engine cannot run a sharded model.
    """
    if settings.engine == "native":
        reason = unsupported_reason(model)
        if reason is None:
            return NativeEngine(model, settings, gather=gather, device=device)
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
        device (torch.device | None): where to compute; None = where the model is.

    Raises:
        ValueError: if the model is not one that the engine can run.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        settings: RolloutConfig,
        *,
        gather: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"rollout.engine=native: {reason}; set rollout.engine to torchtune.")
        self._model, self._settings, self._gather = model, settings, gather
        self._device = device or next(model.parameters()).device
        self._graphs: StepGraphs | None = None
        if settings.cuda_graphs == "auto" and self._device.type == "cuda":
            self._graphs = StepGraphs(CudaRecorder())
        self._buffers = Buffers(self._device)
        self._budget: int | None = None
        self._decoder: NativeDecoder | None = None
        self._cache: GroupCache | None = None

    def cache_bytes(self, request: RolloutRequest) -> int:
        """The most that a rollout keeps: its cache, and a step's memory, which graphs keep."""
        return self._bytes(request, rows=self.rows_at_once(request))

    def rows_at_once(self, request: RolloutRequest) -> int:
        """The rows of a request that are worked on at once.

        As ``max_rows`` says; else as many as fit into a share of the memory that was free when the
        engine was first asked, so that a run's rollouts are all cut in the same way.
        """
        rows = request.allowed_rows
        if self._settings.max_rows is not None:
            return min(self._settings.max_rows, rows)
        if self._budget is None:
            self._budget = round(_SHARE * free_bytes(self._device))
        fits = bisect_right(
            range(1, rows + 1), self._budget, key=lambda r: self._bytes(request, rows=r)
        )
        return max(fits, 1)

    def _bytes(self, request: RolloutRequest, *, rows: int) -> int:
        decoder, _ = self._ready()
        few_shapes, block = self._graphs is not None, GroupCache.BLOCK
        longest = request.params.max_generated_tokens
        prompt_width = GroupCache.rounded(max(map(len, request.prompts)))
        width = coarse(longest, least=block) if few_shapes else GroupCache.rounded(longest)
        places = padded_rows(rows, few_shapes=few_shapes)
        cache = decoder.cache_shape.bytes(
            prompts=prompt_slots(request, max_rows=rows),
            prompt_width=prompt_width,
            rows=places,
            response_width=width,
        )
        return cache + places * decoder.step_bytes(prompt_width + width)

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        """See :meth:`RolloutEngine.generate`."""
        end = end_of_rollout(self._settings.deadline)
        with self._current_weights() as (decoder, cache):
            return GroupRollout(
                decoder,
                cache,
                self._buffers,
                request,
                max_rows=self.rows_at_once(request),
                graphs=None if self._by_layer else self._graphs,
            ).run(end=end)

    @contextmanager
    def _current_weights(self) -> Iterator[tuple[NativeDecoder, GroupCache]]:
        with gathered(self._model, layers=not self._by_layer):
            decoder, cache = self._ready()
            decoder.gather = (
                LayerGather(self._model, device=self._device) if self._by_layer else None
            )
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
            fits = fits_every_rank(self._model, device=self._device)
            self._gather = "once" if fits else "layer"
        return is_sharded and self._gather == "layer"

    def _ready(self) -> tuple[NativeDecoder, GroupCache]:
        if self._decoder is None or self._cache is None:
            self._decoder = _make_decoder(
                self._model,
                merge_adapters=self._settings.merge_adapters,
                may_copy=not self._by_layer,
                device=self._device,
            )
            self._cache = GroupCache(self._decoder.cache_shape)
        return self._decoder, self._cache


def _make_decoder(
    model: TransformerDecoder, *, merge_adapters: str, may_copy: bool, device: torch.device
) -> NativeDecoder:
    """Chooses what to compute in, and whether adapters are merged, by exactness and memory."""
    dtype = model.tok_embeddings.weight.dtype
    free = free_bytes(device) / 2
    choices = [(dtype, False)]
    if dtype == torch.float32 or (device.type == "cpu" and not _has_fast_bf16()):
        choices.insert(0, (torch.float32, True))
    for compute_dtype, merge in choices if may_copy else []:
        if merge_adapters != "auto":
            merge = merge_adapters == "always"
        decoder = NativeDecoder(
            model,
            merge_adapters=merge,
            dtype=compute_dtype,
            move=not isinstance(model, FSDPModule),
            device=device,
        )
        copies = sum(linear.copied_bytes for linear in decoder.linears())
        if copies < free:
            return decoder
    return NativeDecoder(model, merge_adapters=False, dtype=dtype, copy=False, device=device)


def _has_fast_bf16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.12 or so
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
