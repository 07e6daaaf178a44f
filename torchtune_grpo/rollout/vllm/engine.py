"""vLLM as the rollout engine: what all of it has in common, and vLLM in the trainer's process.

Nearly all that goes wrong between a trainer and another engine is silent: weights that are stale or
merged wrongly, keys and values of an earlier policy, log-probs of another distribution. So every
rollout brings the policy's own weights first, which mark the keys and values that are computed with
them, and every rollout and step compares the log-probs of both sides. In this process vLLM starts
with random weights, and checksums are compared, too.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from torchtune_grpo.rollout.vllm.rows import NewTokens, Requests, VLLMRollout
from torchtune_grpo.rollout.vllm.settings import (
    local_problems_in,
    problems_in,
    temperature_problems,
)
from torchtune_grpo.trajectory import Samples

PREFILL_TOKENS = 4096  # of all prompts that are computed at once
MAX_ROWS, MAX_MODEL_LEN, MEMORY_SHARE = 256, 4096, 0.3  # where the config does not say
BLOCK = 32  # tokens whose keys and values lie together, which vLLM's kernels for CPUs require


class VLLMBase(RolloutEngine):
    """Generation with a vLLM that gets the policy's weights before each rollout.

    A prompt and its response have at most ``max_model_len`` tokens.
    """

    reproducible = True  # its steps depend on tokens alone
    problems_in = staticmethod(problems_in)

    def __init__(self, context: EngineContext, *, max_model_len: int = MAX_MODEL_LEN) -> None:
        self._context, self._model = context, context.model
        self._max_model_len = min(max_model_len, context.model.max_seq_len)
        self._weights = PolicyWeights(context.model, context.model_dir)
        self._guard = Guard(context.model)
        self._vocab = 0  # ids below it are sampled

    @classmethod
    def capabilities(
        cls, *, max_model_len: int = MAX_MODEL_LEN, **arguments: object
    ) -> Capabilities:
        # It has filters, but with them reports no log-prob of softmax(logits / temperature).
        return Capabilities(
            turns=True,
            reproducible=cls.reproducible,
            longest_row=max_model_len,
            correction="token_truncate",
        )

    @classmethod
    def check(cls, cfg: GRPOConfig) -> None:
        if problems := [*cls.problems_in(cfg)]:
            raise ConfigError(*problems)

    @abstractmethod
    def _vllm(self, request: RolloutRequest) -> AbstractContextManager[Requests]:
        """Give a vLLM that samples ids below ``_vocab`` with the policy's current weights."""

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        if problems := [*temperature_problems(dict(request.params))]:
            raise ValueError(" ".join(problems))
        assert longest(request) <= self._max_model_len, "see capabilities"
        size = self._model.tok_embeddings.num_embeddings
        vocab = min(request.vocab_size or size, size)
        assert self._vocab in (0, vocab), "a run has one tokenizer"
        self._vocab = vocab
        deadline = self._context.settings.deadline
        # With a deadline time decides, anyway.
        steps = REPLY_STEPS if self.reproducible and deadline is None else None
        with self._vllm(request) as requests:
            rollout = VLLMRollout(requests, request, reply_steps=steps)
            rollout.run(must_stop(deadline))  # which vLLM's start is not part of
        samples = rollout.samples(self._context.device)
        self._guard.compare(request, samples, vocab=self._vocab)
        return samples

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """Raise a ValueError if a step's samples were not drawn from the policy that is trained."""
        self._guard.check_step(metrics)


class VLLMEngine(VLLMBase):
    """Generation with vLLM in this process, where it starts with the first rollout.

    Keys and values get at most ``memory_share`` of the memory that is then free, less what training
    and vLLM's copy of the weights will take. Adapters are merged into that copy.
    """

    problems_in = staticmethod(local_problems_in)

    def __init__(
        self,
        context: EngineContext,
        *,
        max_model_len: int = MAX_MODEL_LEN,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        super().__init__(context, max_model_len=max_model_len)
        self._memory_share = memory_share
        self._sleeps = context.device.type == "cuda"  # between rollouts
        self._llm: Any = None
        self._rollouts = 0
        self._end: Callable[[], object] = lambda: None

    @contextmanager
    def _vllm(self, request: RolloutRequest) -> Iterator[LocalRequests]:
        self._rollouts += 1
        with contained():
            self._start(request)
            with gathered(self._model):
                self._bring_weights()
                self._compare_weights()
        yield LocalRequests(self._llm.llm_engine, salt=str(self._rollouts))
        if self._sleeps:  # its weights come anew
            with contained():
                self._llm.sleep(level=2)

    def close(self) -> None:
        """End vLLM, and what it has started in this process."""
        self._end()
        self._llm = None

    def _start(self, request: RolloutRequest) -> None:
        """Start vLLM with the first request, or wake it."""
        if self._llm is not None:
            if self._sleeps and self._llm.llm_engine.is_sleeping():
                self._llm.wake_up()
            return
        import vllm
        from vllm.platforms import current_platform

        owns_group = not dist.is_initialized()  # else it joins that of the ranks
        self._sleeps = self._sleeps and current_platform.is_sleep_mode_available()
        logging.getLogger("vllm").setLevel(logging.ERROR)
        on_cpu = self._context.device.type == "cpu"
        rows = self._context.settings.max_rows or MAX_ROWS
        kept = rows if request.turns is None else 2 * rows  # those that wait for a reply, too
        free = free_bytes(self._context.device) - self._context.bytes_to_come()
        room = self._memory_share * (free - self._weights.bytes)
        self._llm = vllm.LLM(
            model=str(self._context.model_dir),
            skip_tokenizer_init=True,
            load_format="dummy",
            hf_overrides={"vocab_size": self._vocab},
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


class LocalRequests:
    """Requests to an ``LLMEngine``, in whose cache ``salt`` marks the weights."""

    def __init__(self, engine: Any, *, salt: str) -> None:
        self._engine, self._salt = engine, salt

    def add(self, name: str, tokens: list[int], settings: dict[str, Any]) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompt = {"prompt_token_ids": tokens, "cache_salt": self._salt}
        params = SamplingParams(**settings, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(name, prompt, params)

    def step(self) -> list[NewTokens]:
        with contained():
            outputs = self._engine.step()
        return [_new_tokens(output.request_id, output.outputs[0]) for output in outputs]

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request([*names])


def _new_tokens(name: str, new: Any) -> NewTokens:
    pairs = zip(new.token_ids, new.logprobs, strict=True)
    logprobs = [entry[token].logprob for token, entry in pairs]
    return NewTokens(name, new.token_ids, logprobs, new.finish_reason)


def longest(request: RolloutRequest) -> int:
    """Return the most tokens of a prompt with its response."""
    return max(map(len, request.prompts)) + request.max_row_tokens


def _pack_head(model: nn.Module) -> None:
    """Pack the output projection anew: where it shares the embeddings, reloading does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
