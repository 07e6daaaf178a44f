"""vLLM as the rollout engine: in this process, one request for a row's turn, stepped from here.

Nearly all that goes wrong between a trainer and another engine is silent: weights that are stale or
merged wrongly, keys and values of an earlier policy, log-probs of another distribution. So vLLM
starts with random weights, every rollout brings the policy's own first and compares checksums, and
every rollout and step compares the log-probs of both sides.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import ConfigError
from torchtune_grpo.machine.device import free_bytes
from torchtune_grpo.machine.parallel import gathered, world_size
from torchtune_grpo.rollout.native import REPLY_STEPS
from torchtune_grpo.rollout.request import (
    Capabilities,
    EngineContext,
    RolloutEngine,
    RolloutRequest,
    must_stop,
)
from torchtune_grpo.rollout.vllm.guard import (
    ANOTHER_POLICY,
    Guard,
    PolicyWeights,
    vllms_checksums,
)
from torchtune_grpo.rollout.vllm.process import contained, end
from torchtune_grpo.rollout.vllm.rows import VLLMRollout
from torchtune_grpo.rollout.vllm.settings import problems_in, temperature_problems
from torchtune_grpo.trajectory import Samples

PREFILL_TOKENS = 4096  # of all prompts that are computed at once
MAX_ROWS, MAX_MODEL_LEN, MEMORY_SHARE = 256, 4096, 0.3  # where the config does not say
BLOCK = 32  # tokens whose keys and values lie together, which vLLM's kernels for CPUs require


class VLLMEngine(RolloutEngine):
    """Generation with vLLM, which starts with the first rollout.

    A prompt and its response have at most ``max_model_len`` tokens. Keys and values get at most
    ``memory_share`` of the memory that is then free, less what training and vLLM's copy of the
    weights will take. Adapters are merged into that copy.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        max_model_len: int = MAX_MODEL_LEN,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        self._context, self._model, self._memory_share = context, context.model, memory_share
        self._max_model_len = min(max_model_len, context.model.max_seq_len)
        self._weights = PolicyWeights(context.model, context.model_dir)
        self._guard = Guard(context.model)
        self._sleeps = context.device.type == "cuda"  # between rollouts
        self._llm: Any = None
        self._vocab = 0  # ids below it are sampled
        self._rollouts = 0
        self._end: Callable[[], object] = lambda: None

    @classmethod
    def capabilities(
        cls, *, max_model_len: int = MAX_MODEL_LEN, **arguments: object
    ) -> Capabilities:
        # It has filters, but with them reports no log-prob of softmax(logits / temperature).
        return Capabilities(
            turns=True, reproducible=True, longest_row=max_model_len, correction="token_truncate"
        )

    @classmethod
    def check(cls, cfg: GRPOConfig) -> None:
        if problems := [*problems_in(cfg)]:
            raise ConfigError(*problems)

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        if problems := [*temperature_problems(dict(request.params))]:
            raise ValueError(" ".join(problems))
        assert longest(request) <= self._max_model_len, "see capabilities"
        self._rollouts += 1
        with contained():
            self._start(request)
            with gathered(self._model):
                self._bring_weights()
                self._compare_weights()
        deadline = self._context.settings.deadline  # which vLLM's start is not part of
        rollout = VLLMRollout(
            self._llm.llm_engine,
            request,
            salt=str(self._rollouts),
            # With a deadline time decides, anyway.
            reply_steps=REPLY_STEPS if deadline is None else None,
        )
        rollout.run(must_stop(deadline))
        if self._sleeps:  # its weights come anew
            with contained():
                self._llm.sleep(level=2)
        samples = rollout.samples(self._context.device)
        self._guard.compare(request, samples, vocab=self._vocab)
        return samples

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """Raise a ValueError if a step's samples were not drawn from the policy that is trained."""
        self._guard.check_step(metrics)

    def close(self) -> None:
        """End vLLM, and what it has started in this process."""
        self._end()
        self._llm = None

    def _start(self, request: RolloutRequest) -> None:
        """Start vLLM with the first request, whose ``vocab_size`` the others share, or wake it."""
        size = self._model.tok_embeddings.num_embeddings
        vocab = min(request.vocab_size or size, size)
        if self._llm is not None:
            assert vocab == self._vocab, "a run has one tokenizer"
            if self._sleeps and self._llm.llm_engine.is_sleeping():
                self._llm.wake_up()
            return
        import vllm
        from vllm.platforms import current_platform

        owns_group = not dist.is_initialized()  # else it joins that of the ranks
        self._sleeps = self._sleeps and current_platform.is_sleep_mode_available()
        logging.getLogger("vllm").setLevel(logging.ERROR)
        on_cpu = self._context.device.type == "cpu"
        rows, self._vocab = self._context.settings.max_rows or MAX_ROWS, vocab
        kept = rows if request.turns is None else 2 * rows  # those that wait for a reply, too
        free = free_bytes(self._context.device) - self._context.bytes_to_come()
        room = self._memory_share * (free - self._weights.bytes)
        self._llm = vllm.LLM(
            model=str(self._context.model_dir),
            skip_tokenizer_init=True,
            load_format="dummy",
            hf_overrides={"vocab_size": vocab},
            dtype=self._weights.dtype,
            max_model_len=self._max_model_len,
            max_num_seqs=rows,
            # A prompt cut in two turns its rows' generators back, which those on CPUs cannot do.
            enable_chunked_prefill=not on_cpu,
            max_num_batched_tokens=max(self._max_model_len, PREFILL_TOKENS),
            block_size=BLOCK,
            kv_cache_memory_bytes=cache_bytes(
                self._model, kept, longest=longest(request), most=self._max_model_len, room=room
            ),
            gpu_memory_utilization=0.01,  # unused, but refused where less than it is free
            enforce_eager=on_cpu,
            enable_sleep_mode=self._sleeps,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # none of the model's own temperature and filters
            distributed_executor_backend="external_launcher" if world_size() > 1 else "uni",
            seed=0,  # each row has its own
        )
        client = self._llm.llm_engine.engine_core
        self._end = weakref.finalize(self, end, client, owns_group=owns_group)

    def _bring_weights(self) -> None:
        """Give vLLM the policy's current weights; nothing else does."""
        weights = {"weights_iterator": self._weights.named(vocab=self._vocab)}
        self._llm.collective_rpc("reload_weights", kwargs=weights)
        self._llm.apply_model(_pack_head)
        if not self._llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("vLLM still holds keys and values of an earlier policy")

    def _compare_weights(self) -> None:
        """Raise a ValueError if vLLM does not compute with the policy's current weights."""
        (held,) = self._llm.apply_model(vllms_checksums)
        if held != self._weights.checksums(vocab=self._vocab):
            raise ValueError(
                f"rollout.engine=vllm: vLLM's weights are not those of the policy. {ANOTHER_POLICY}"
            )


def cache_bytes(
    model: TransformerDecoder, rows: int, *, longest: int, most: int, room: float
) -> int:
    """Return the bytes for keys and values of ``rows`` of up to twice the ``longest``.

    They fill the ``room`` at most, but hold one row of ``most`` tokens.
    """
    attention, dtype = model.layers[0].attn, model.tok_embeddings.weight.dtype
    numbers = 2 * len(model.layers) * attention.num_kv_heads * attention.head_dim
    whole, likely = ((n + 2 * BLOCK) * numbers * dtype.itemsize for n in (most, 2 * longest))
    return int(max(whole, min(rows * likely, room)))


def longest(request: RolloutRequest) -> int:
    """Return the most tokens of a prompt with its response."""
    return max(map(len, request.prompts)) + request.max_row_tokens


def _pack_head(model: nn.Module) -> None:
    """Pack the output projection anew: where it shares the embeddings, reloading does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
