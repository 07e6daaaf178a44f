"""Estimates a config's GPU memory.

    python benchmarks/memory_estimate.py recipes/configs/llama3_2_1B_lora_grpo.yaml --card 24
    python benchmarks/memory_estimate.py recipes/configs/hf_lora_grpo.yaml model_dir=/tmp/Qwen3-1.7B

A model's shape is read from the config.json in `model_dir`; without such a folder, a few models are
known by its name. Prompts and responses are as long as the config allows. The parts, in GiB:

    weights, gradients, moments (with float32 masters, if kept), reference (a copy of the weights),
    context    what CUDA and its libraries take
    cache      keys and values of a step's rollout or an evaluation's, the larger of the two
    copy       vLLM's copy of the weights, which stays, as its cache does
    graphs     what recorded decoding steps write to
    adapter_copies  copies of adapters that a rollout reads
    rollout    on top during a rollout: copies of weights, and a prefill's activations or logits
    update     on top during a micro-batch: the real update runs on tensors without memory (torch's
               FakeTensorMode), and what is alive at once is added up
    optimizer  on top during a step on bf16 weights: the parts that are float32 meanwhile

The peak is the sum of all, except that of `rollout`, `gradients` + `update` and
`gradients` + `optimizer` only the largest counts. `--card` is a GPU's memory in GiB: where
rollout.max_rows is null, a rollout takes as many rows as fit into the engine's share of what is
free before the first step, less moments and gradients; without `--card`, all. It also decides what
`auto` means for enable_activation_checkpointing and forward_batch_size. The allocator's
fragmentation is not included: leave 10 to 15%. Prints one JSON line. benchmarks/gpu.py compares the
estimate with what steps take on a card.
"""

import argparse
import json
import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from common import random_prompts, random_rows, report, request_of
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import config, modules, training
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.loss import make_loss
from torchtune_grpo.models import layers
from torchtune_grpo.models.layers import attend_in_segments, standardize
from torchtune_grpo.rollout.batch import PREFILL_TOKENS
from torchtune_grpo.rollout.cache import GroupCache, padded_rows
from torchtune_grpo.rollout.decoder import NativeDecoder
from torchtune_grpo.rollout.engine import engine_class
from torchtune_grpo.rollout.native import MEMORY_SHARE, NativeEngine
from torchtune_grpo.rollout.request import EngineContext, RolloutRequest
from torchtune_grpo.rollout.vllm import engine as vllm
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.logprobs import default_chunk_bytes
from torchtune_grpo.training.memory import choose_passes
from torchtune_grpo.training.mini_batches import cut
from torchtune_grpo.training.optimizer import has_masters, later_bytes, make_optimizer
from torchtune_grpo.training.policy import empty_model
from torchtune_grpo.trajectory import Trajectory

GIB = 2**30
NF4_BYTES = 0.52  # a parameter, with the scales of its blocks
CONTEXT_BYTES = 0.5 * GIB
VOCAB = 1000  # vocabulary of prompts and responses
IN_TURN = ("rollout", "gradients", "update", "optimizer")
# What a model's size depends on in its public config.json.
KEYS = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size tie_word_embeddings max_position_embeddings"
).split()
KNOWN = {
    "shape-tiny": ("llama", 128, 256, 2, 2, 2, 64, 2048, True, 4096),
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 40960),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "SmolLM2-1.7B-Instruct": ("llama", 2048, 8192, 24, 32, 32, 64, 49152, True, 8192),
    "Llama-3.1-8B-Instruct": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072),
}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are made within it and alive, ``now`` and at the ``peak``."""

    def __init__(self, known: nn.Module | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in [] if known is None else [*known.parameters(), *known.buffers()]:
            self._seen[tensor.untyped_storage()] = True
            if tensor.grad is not None:
                self._seen[tensor.grad.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage() not in self._seen:
                storage = leaf.untyped_storage()
                self._seen[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, bytes_: int) -> None:
        self.now += bytes_
        self.peak = max(self.peak, self.now)


# --- The estimate ---------------------------------------------------------------------------------


def estimate(
    node: DictConfig, *, card: float | None = None, device: str = "cuda"
) -> dict[str, float]:
    """Return GiB by part, the peak, and how many rows are rolled out at once.

    Args:
        node (DictConfig): the config as in its file.
        card (float | None): GiB of the device; None = all rows fit.
        device (str): "cpu" leaves out what only CUDA takes, has a CPU's smaller blocks of logits,
            and does not evaluate.
    """
    cfg, cuda = read_config(node), device == "cuda"
    with default_dtype(cfg):
        model = empty_model(cfg)
    size = 2 if cfg.dtype == "bf16" else 4
    adapters = get_adapter_params(model)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in adapters.values()) or count
    nf4 = sum(p.numel() for p in model.parameters() if isinstance(p.data, NF4Tensor))
    base = count - (trained if adapters else 0)
    dtype = torch.float32 if adapters or size == 4 else torch.bfloat16  # of what is trained
    width = dtype.itemsize
    parts = {
        "weights": (base - nf4) * size + nf4 * NF4_BYTES + (trained * width if adapters else 0),
        "reference": base * size if not adapters and cfg.loss.kl_coeff > 0 else 0,
        "context": CONTEXT_BYTES if cuda else 0,
    }
    free = math.inf if card is None else card * GIB - sum(parts.values())  # before the first step
    optimizer = make_optimizer(cfg.optimizer, [nn.Parameter(torch.zeros(1, dtype=dtype))])
    masters = has_masters(optimizer)
    training = {
        "moments": later_bytes(optimizer, [torch.empty(trained, dtype=dtype, device="meta")]),
        "gradients": trained * (4 if masters else width),
    }
    free -= sum(training.values())
    if "auto" in (cfg.forward_batch_size, cfg.enable_activation_checkpointing):
        longest = cfg.dataset.max_prompt_tokens + cfg.max_response_tokens
        known = int(free) if cuda and card is not None else None
        cfg = choose_passes(cfg, model, longest=longest, free=known)
    update, buffers = update_bytes(cfg, device=torch.device(device))
    parts["weights"] += buffers
    free -= buffers
    rollout, rows = rollout_bytes(model, cfg, free=free, cuda=cuda)
    parts |= rollout | training | {"update": update, "optimizer": 0}
    if width == 2 and not masters:  # a weight at a time, with its gradient and moments in float32
        parts["optimizer"] = 4 * 4 * max(p.numel() for p in model.parameters())
    gib = {name: value / GIB for name, value in parts.items()}
    stays = sum(gib.values()) - sum(gib[name] for name in IN_TURN)
    trains = gib["gradients"] + max(gib["update"], gib["optimizer"])
    gib["peak"] = stays + max(gib["rollout"], trains)
    return {name: round(value, 2) for name, value in gib.items()} | rows


def rollout_bytes(
    model: TransformerDecoder, cfg: GRPOConfig, *, free: float, cuda: bool
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the bytes that a rollout takes, some of them for good, and the rows at once."""
    if engine_class(cfg.rollout) is vllm.VLLMEngine:
        return vllm_bytes(model, cfg, free=free)
    meta = torch.device("meta")
    merges = cfg.rollout.engine.get("merge_adapters", "auto")
    decoder = NativeDecoder(
        model,
        merge_adapters=merges == "always" or (merges == "auto" and cfg.dtype == "fp32"),
        dtype=model.tok_embeddings.weight.dtype,
        device=meta,
    )
    engine = NativeEngine(EngineContext(model, cfg.rollout, meta))
    engine._decoder, engine._cache = decoder, GroupCache(decoder.cache_shape)
    graphs = cuda and cfg.rollout.engine.get("cuda_graphs", "auto") == "auto"
    copies = sum(linear.copied_bytes for linear in decoder.linears())
    if copies >= free / 2:
        copies = 0  # the modules are called as they are
    size = decoder.dtype.itemsize
    beside = 0  # bytes of unmerged adapters: A, and B with blocks on its diagonal
    for linear in decoder.linears():
        if sum(linear.ranks):
            inputs = next(m.lora_a.in_features for m in linear._modules if hasattr(m, "lora_a"))
            beside += sum(linear.ranks) * (sum(linear.sizes) + inputs) * size
    engine._budget = int(min(MEMORY_SHARE * (free - copies - beside), 2**60))
    requests = {"rows": request(cfg, prompts=cfg.batch_size, group=cfg.grpo_samples)}
    if cuda and cfg.eval_dataset is not None:
        prompts = cfg.eval_dataset.get("num_samples") or 256
        requests["eval_rows"] = request(cfg, prompts=prompts, group=max(1, cfg.evaluation.samples))
    rows = {name: engine.rows_at_once(wanted) for name, wanted in requests.items()}
    longest = cfg.dataset.max_prompt_tokens
    step = max(padded_rows(n) for n in rows.values()) * decoder.step_bytes(
        GroupCache.rounded(longest) + GroupCache.rounded(cfg.max_generated_tokens),
        cfg.sampling_params,
    )
    cache = max(engine.cache_bytes(requests[name], rows=rows[name]) for name in rows) - step
    tokens = longest * max(1, min(cfg.batch_size, PREFILL_TOKENS // longest))
    hidden, dim = model.layers[0].mlp.w1.weight.shape
    prefill = tokens * (4 * hidden + 4 * dim) * size
    parts = {"cache": cache, "graphs": step if graphs else 0, "adapter_copies": beside}
    # On a CPU the logits' projection is widened to float32 for its product.
    widened = 0 if cuda or cfg.dtype == "fp32" else 4 * decoder.vocab * dim
    return parts | {"rollout": copies + max(prefill, widened + (0 if graphs else step))}, rows


def vllm_bytes(
    model: TransformerDecoder, cfg: GRPOConfig, *, free: float
) -> tuple[dict[str, float], dict[str, int]]:
    """Return what ``rollout_bytes`` does, with vLLM as the engine."""
    arguments, rows = cfg.rollout.engine, cfg.rollout.max_rows or vllm.MAX_ROWS
    adapters = get_adapter_params(model)
    numbers = sum(p.numel() for name, p in model.named_parameters() if name not in adapters)
    size = model.tok_embeddings.weight.dtype.itemsize
    cache = vllm.cache_bytes(
        model,
        rows if not cfg.has_environment else 2 * rows,
        longest=cfg.dataset.max_prompt_tokens + cfg.max_generated_tokens,
        most=min(arguments.get("max_model_len", vllm.MAX_MODEL_LEN), model.max_seq_len),
        room=arguments.get("memory_share", vllm.MEMORY_SHARE) * (free - numbers * size),
    )
    hidden, dim = model.layers[0].mlp.w1.weight.shape
    prefill = vllm.PREFILL_TOKENS * (4 * hidden + 4 * dim) * size
    parts = {"copy": numbers * size, "cache": cache, "graphs": 0, "adapter_copies": 0}
    return parts | {"rollout": prefill}, {"rows": rows}


def update_bytes(cfg: GRPOConfig, *, device: torch.device) -> tuple[float, float]:
    """Return the largest micro-batch's peak bytes, less weights and gradients, and the buffers'.

    If there are several micro-batches, the gradients of one are there in the next.
    """
    parts = cut(longest_rows(cfg), cfg)
    node = OmegaConf.merge(cfg.model, {})
    node._component_ = node._component_.replace("qlora_", "lora_")
    if "quantize_base" in node:
        node.quantize_base = False
    with default_dtype(cfg), torch.device("meta"):
        model = config.instantiate(node)
        prepare(model, cfg)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = model.to_empty(device="cpu").train()
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, fake.from_tensor(buffer))
        trained = [p for p in model.parameters() if p.requires_grad]
        gradients = sum(p.numel() * p.itemsize for p in trained)
        if len(parts) > 1:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            gradients = 0
        chunk = default_chunk_bytes(device, tokens=len(parts[0].layout.targets))
        with attention_of(device), LiveBytes(model) as live:
            logprobs, entropy = response_logprobs(
                model,
                parts[0].layout,
                temperature=cfg.temperature,
                entropy="gradient" if make_loss(cfg.loss).needs_entropy_gradient else "value",
                chunk_bytes=chunk,
            )
            (logprobs + entropy).sum().backward()
    buffers = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in model.buffers()}
    return live.peak - gradients + dequantized_bytes(cfg), sum(buffers.values())


def attention_of(device: torch.device) -> AbstractContextManager:
    """Return a context in which tensors without memory attend as on a device.

    They are on the CPU, as autograd refuses tensors on a device that torch was not built for.
    """
    cuda = {"has_varlen_kernel": lambda q: q.dtype == torch.bfloat16}
    return patch.multiple(layers, **cuda) if device.type == "cuda" else nullcontext()


def dequantized_bytes(cfg: GRPOConfig) -> float:
    """Return the bytes that dequantizing the largest NF4 weight takes, scaled from a small one."""
    with default_dtype(cfg):
        weights = [p.data for p in empty_model(cfg).parameters()]
        largest = max((w.numel() for w in weights if isinstance(w, NF4Tensor)), default=0)
        small = to_nf4(torch.randn(512, 512)) if largest else None
        with LiveBytes() as live:
            if small is not None:
                small.get_original_weight()
    return live.peak / 512**2 * largest


# --- The config's model and rows ------------------------------------------------------------------


def default_dtype(cfg: GRPOConfig) -> Any:
    """Return a context in which modules are made in the config's dtype."""
    return training.set_default_dtype(training.get_dtype(cfg.dtype, device=torch.device("cpu")))


def prepare(model: TransformerDecoder, cfg: GRPOConfig) -> None:
    """Prepare a model for an update, as make_policy and the recipe do."""
    standardize(model)
    if cfg.pack_groups:
        attend_in_segments(model)
    if get_adapter_params(model):
        set_trainable_params(model, get_adapter_params(model))
    if cfg.enable_activation_checkpointing:
        layers = {modules.TransformerSelfAttentionLayer}
        training.set_activation_checkpointing(model, auto_wrap_policy=layers)


def request(cfg: GRPOConfig, *, prompts: int, group: int) -> RolloutRequest:
    """Make a request: prompts as long as the config allows, and responses that nothing ends."""
    lengths = [cfg.dataset.max_prompt_tokens] * prompts
    return request_of(
        random_prompts(lengths, VOCAB), new_tokens=cfg.max_generated_tokens, group=group
    )


def longest_rows(cfg: GRPOConfig) -> Trajectory:
    """Return a step's rows, each as long as the config allows."""
    return random_rows(
        vocab=VOCAB,
        groups=cfg.batch_size,
        group=cfg.grpo_samples,
        prompt=cfg.dataset.max_prompt_tokens,
        shortest=cfg.max_generated_tokens,
        longest=cfg.max_generated_tokens,
    )


# --- Running --------------------------------------------------------------------------------------


def main() -> None:
    """Print the estimate of one config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a shipped config's name, or a file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to it")
    parser.add_argument("--card", type=float, help="memory of the GPU in GiB; default: all fits")
    args = parser.parse_intermixed_args()
    cfg = load_config(args.config, args.overrides)
    with TemporaryDirectory() as folder:
        name = Path(cfg.get("model_dir") or "").name
        if name in KNOWN and not Path(cfg.model_dir).is_dir():
            cfg.model_dir = str(shape_folder(Path(folder), name))
        report("memory_estimate", args, estimate=estimate(cfg, card=args.card))


def shape_folder(parent: Path, name: str) -> Path:
    """Make a model's folder with nothing but the config.json of a known model."""
    folder = parent / name
    folder.mkdir(parents=True)
    shape = dict(zip(KEYS, KNOWN[name], strict=True))
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


if __name__ == "__main__":
    main()
