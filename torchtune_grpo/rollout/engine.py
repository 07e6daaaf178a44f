"""The native engine (weights and memory), torchtune's engine, and the choice between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtune import utils
from torchtune.modules import TransformerDecoder
from torchtune.modules.common_utils import local_kv_cache

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine.device import free_bytes
from torchtune_grpo.machine.parallel import gathered
from torchtune_grpo.models.layers import unembed_with
from torchtune_grpo.rollout.batch import GroupRollout, Transcript, prompt_slots
from torchtune_grpo.rollout.cache import GroupCache, padded_rows
from torchtune_grpo.rollout.decoder import NativeDecoder, unsupported_reason
from torchtune_grpo.rollout.graphs import Buffers, CudaRecorder, StepGraphs
from torchtune_grpo.rollout.request import Progress, RolloutEngine, RolloutRequest, must_stop
from torchtune_grpo.trajectory import Samples

log = utils.get_logger("INFO")

MEMORY_SHARE = 0.4  # share of free memory for a rollout; the update's activations need the rest


def make_engine(
    model: TransformerDecoder,
    settings: RolloutConfig,
    *,
    is_sharded: bool = False,
    device: torch.device | None = None,
    bytes_to_come: Callable[[], int] = lambda: 0,
) -> RolloutEngine:
    """Make the config's engine, or torchtune's engine for a model that ours does not support.

    It reads the model's current weights at every call. The model must not be compiled or sharded
    yet; ``is_sharded`` says that it will be sharded. ``device`` is where to compute; None = where
    the model is. ``bytes_to_come`` returns how much of its free memory training is going to take.
    """
    if settings.engine == "native":
        reason = unsupported_reason(model)
        if reason is None:
            return NativeEngine(model, settings, device=device, bytes_to_come=bytes_to_come)
        log.warning(f"rollout.engine=native: {reason}; generating with torchtune's own modules.")
    if is_sharded:  # it would gather every layer for every token, in step with the other ranks
        raise ValueError(
            "rollout.engine=torchtune: cannot run a sharded model; set distributed.sharding=never."
        )
    return TorchtuneEngine(model, settings)


class NativeEngine:
    """The fast engine, for models that :func:`unsupported_reason` accepts; gathers sharded ones."""

    def __init__(
        self,
        model: TransformerDecoder,
        settings: RolloutConfig,
        *,
        device: torch.device | None = None,
        bytes_to_come: Callable[[], int] = lambda: 0,
    ) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"rollout.engine=native: {reason}; set rollout.engine to torchtune.")
        self._model, self._settings = model, settings
        self._device = device or next(model.parameters()).device
        self._bytes_to_come = bytes_to_come
        self._graphs: StepGraphs | None = None
        if settings.cuda_graphs == "auto" and self._device.type == "cuda":
            self._graphs = StepGraphs(CudaRecorder())
        self._buffers = Buffers(self._device)
        self._budget: int | None = None
        self._decoder: NativeDecoder | None = None
        self._cache: GroupCache | None = None

    def rows_at_once(self, request: RolloutRequest) -> int:
        """Return the number of rows of a request that are sampled at once.

        Without ``max_rows`` it is what fits into a share of the memory that was free at the first
        call, less what training will take, so that all rollouts of a run are split the same way.
        """
        rows = request.num_rows
        if self._settings.max_rows is not None:
            return min(self._settings.max_rows, rows)
        if self._budget is None:
            self._budget = round(MEMORY_SHARE * self._free())
        fits = bisect_right(
            range(1, rows + 1), self._budget, key=lambda r: self.cache_bytes(request, rows=r)
        )
        return max(fits, 1)

    def _free(self) -> int:
        return free_bytes(self._device) - self._bytes_to_come()

    def cache_bytes(self, request: RolloutRequest, *, rows: int) -> int:
        """Return the most bytes a rollout keeps: its cache, and a step's memory, held by graphs."""
        decoder, _ = self._ready()
        longest = request.params.max_generated_tokens
        prompt_width = GroupCache.rounded(max(map(len, request.prompts)))
        width = GroupCache.rounded(longest)
        places = padded_rows(rows)
        cache = decoder.cache_shape.bytes(
            prompts=prompt_slots(request, max_rows=rows),
            prompt_width=prompt_width,
            rows=places,
            response_width=width,
        )
        return cache + places * decoder.step_bytes(prompt_width + width, request.params)

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        stop = must_stop(self._settings.deadline)
        with self.current_weights() as (decoder, cache):
            max_rows = self.rows_at_once(request)
            graphs = self._graphs if decoder.has_kernel else None
            return GroupRollout(
                decoder, cache, self._buffers, request, max_rows=max_rows, graphs=graphs
            ).run(stop)

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
            merge, room = self._settings.merge_adapters, self._free() / 2
            self._decoder = _make_decoder(
                self._model, merge_adapters=merge, device=self._device, room=room
            )
            self._cache = GroupCache(self._decoder.cache_shape)
        return self._decoder, self._cache


def _make_decoder(
    model: TransformerDecoder, *, merge_adapters: str, device: torch.device, room: float
) -> NativeDecoder:
    """Choose the dtype, and whether to merge adapters, by exactness and room for copies."""
    dtype = model.tok_embeddings.weight.dtype
    choices = [(dtype, False)]
    if dtype == torch.float32 or (device.type == "cpu" and not _has_fast_bf16()):
        choices.insert(0, (torch.float32, True))
    for compute_dtype, merge in choices:
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
        if copies < room:
            return decoder
    return NativeDecoder(model, merge_adapters=False, dtype=dtype, copy=False, device=device)


def _has_fast_bf16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.12 or so
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


class TorchtuneEngine:
    """Generation with the model's own forward: slower, but for any torchtune decoder.

    It samples one group at a time, or ``max_rows`` of its rows: the prompt is prefilled once into
    torchtune's KV cache, and its keys and values are then repeated for the rows.
    """

    def __init__(self, model: TransformerDecoder, settings: RolloutConfig) -> None:
        self._model = model
        self._settings = settings

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def generate(self, request: RolloutRequest) -> Samples:
        stop = must_stop(self._settings.deadline)
        device = next(self._model.parameters()).device
        group, total = request.group_size, request.num_rows
        at_once = min(self._settings.max_rows or group, group)
        vocab = self._model.tok_embeddings.num_embeddings
        transcript = Transcript(request, places=at_once, vocab=vocab, buffers=Buffers(device))
        lengths: list[int] = []
        truncated: list[bool] = []
        groups = torch.arange(total, device=device).split(group)
        for prompt, of_group in zip(request.prompts, groups, strict=True):
            for rows in of_group.split(at_once):
                ends, count = [0] * len(rows), 0
                if not stop():
                    ends, count = self._sample(transcript, rows=rows, prompt=prompt, must_stop=stop)
                lengths += [length or count for length in ends]
                truncated += [length == 0 for length in ends]
            if request.report is not None:
                progress = Progress(sum(lengths), finished=len(lengths), live=0, rows=total)
                request.report(progress)
        return transcript.samples(lengths=lengths, truncated=truncated)

    def _sample(
        self,
        transcript: Transcript,
        *,
        rows: Tensor,
        prompt: Sequence[int],
        must_stop: Callable[[], bool],
    ) -> tuple[list[int], int]:
        """Sample rows [n] of one prompt of P tokens until all have ended or ``must_stop()``.

        Returns the lengths at which they ended, 0 for those that did not, and the number of tokens
        sampled for each.
        """
        model, n, limit = self._model, len(rows), transcript.tokens.shape[1]
        position = torch.arange(len(prompt) + limit, device=rows.device)
        ends = [0] * n

        def last_logits(h: Tensor) -> Tensor:
            return model.output(model.norm(h[:, -1]))  # [b, V]

        def forward(tokens: Tensor, at: Tensor) -> Tensor:
            """Map tokens [b, s] at positions [s] to the logits [b, V] of the token after them."""
            mask = (position <= at[:, None]).expand(len(tokens), -1, -1)  # [b, s, P + limit]
            return model(tokens, mask=mask, input_pos=at.expand(len(tokens), -1))

        with (
            unembed_with(model, last_logits),
            local_kv_cache(
                model,
                batch_size=1,
                device=rows.device,
                dtype=model.tok_embeddings.weight.dtype,
                decoder_max_seq_len=len(position),
            ),
        ):
            tokens = torch.tensor([prompt], device=rows.device)
            logits = forward(tokens, position[: len(prompt)]).expand(n, -1)
            for layer in model.layers:
                cache = layer.attn.kv_cache
                cache.k_cache = cache.k_cache.repeat_interleave(n, dim=0)
                cache.v_cache = cache.v_cache.repeat_interleave(n, dim=0)
                cache.batch_size = n
            transcript.begin([prompt] * n, places=range(n))
            for count in range(limit):
                last = None if count == 0 else torch.full_like(rows, count - 1)
                transcript.sample(logits, rows=rows, last=last, places=slice(n))
                new = transcript.ends(rows, counts=[count + 1] * n, unseen=1)
                ends = [old or length for old, length in zip(ends, new, strict=True)]
                if all(ends) or count + 1 == limit or must_stop():
                    break
                tokens = transcript.tokens[rows, count, None]
                logits = forward(tokens, position[len(prompt) + count, None])
        return ends, count + 1
