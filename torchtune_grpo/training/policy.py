"""The policy, built from a config and a checkpoint; the checks of both; and its reference."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune import config, training, utils
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params, set_trainable_params

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.command_line import hub_name
from torchtune_grpo.config.keys import DistributedConfig, GRPOConfig
from torchtune_grpo.config.text import Problems, describe, read_json
from torchtune_grpo.machine.device import free_bytes, weight_bytes
from torchtune_grpo.machine.parallel import (
    gather_over_ranks,
    reshard,
    shard,
    sharded_like,
    world_size,
)
from torchtune_grpo.models.adapter import (
    adapter_files,
    adapter_settings,
    check_adapter,
    merge_adapter,
    read_adapter,
)
from torchtune_grpo.models.layers import standardize
from torchtune_grpo.models.weights import hf_config_of
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.optimizer import make_lr_scheduler
from torchtune_grpo.training.packing import MicroBatch, attend_in_segments

log = utils.get_logger("INFO")


def should_shard(cfg: GRPOConfig, *, device: torch.device) -> bool:
    """Whether the model is sharded over the ranks, the same on all of them; allocates nothing.

    ``distributed.sharding: auto`` shards a model whose weights are all trained, and a frozen base
    with adapters where it would take more than half of a rank's free memory.
    """
    if world_size() == 1:
        return False
    if cfg.distributed.sharding != "auto":
        return cfg.distributed.sharding == "always"
    with training.set_default_dtype(training.get_dtype(cfg.dtype, device=device)):
        model = empty_model(cfg)
    if not get_adapter_params(model):
        return True
    fits = weight_bytes(model) <= free_bytes(device) / 2
    if all(gather_over_ranks(fits)):
        return False
    utils.log_rank_zero(log, "A rank's memory does not hold the whole model: it is sharded.")
    return True


def empty_model(cfg: GRPOConfig) -> TransformerDecoder:
    """``cfg.model`` on the meta device, where its weights take no memory."""
    with torch.device("meta"):
        return instantiate("model", cfg.model)


def make_policy(cfg: GRPOConfig, *, device: torch.device) -> TransformerDecoder:
    """Make ``cfg.model`` in ``cfg.dtype``; only adapters, if any, are trained, and in float32.

    The device may be meta.
    """
    computes = torch.device("cpu") if device.type == "meta" else device  # asked for bf16 support
    dtype = training.get_dtype(cfg.dtype, device=computes)
    with training.set_default_dtype(dtype), device:
        model = config.instantiate(cfg.model)
        standardize(model)
    if cfg.pack_groups:
        attend_in_segments(model)
    if adapters := get_adapter_params(model):
        set_trainable_params(model, adapters)
    return model


def load_policy(model: TransformerDecoder, cfg: GRPOConfig, state_dict: Mapping[str, Any]) -> None:
    """Load a checkpoint's full weights into a model from :func:`make_policy`.

    ``cfg.adapter_dir`` is loaded into the model's adapters, or merged into a model without any.
    """
    adapters = get_adapter_params(model)
    start: dict[str, Tensor] = {}
    if cfg.adapter_dir is not None:
        start = read_adapter(cfg.adapter_dir, hf_config=hf_config_of(cfg.checkpointer))
        if not adapters:
            lora = adapter_settings(cfg.adapter_dir)
            rank, alpha = lora["lora_rank"], lora["lora_alpha"]
            state_dict = merge_adapter({**state_dict, **start}, rank=rank, alpha=alpha)
    missing, unexpected = model.load_state_dict(state_dict, strict=False)
    missing = [name for name in missing if name not in adapters]
    if missing or unexpected:
        raise ValueError(
            f"model._component_={cfg.model._component_}: does not match the checkpoint in "
            f"{cfg.checkpointer.checkpoint_dir}: missing {missing[:3]}, unexpected "
            f"{list(unexpected)[:3]}. Name the builder of the model that was downloaded."
        )
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    if adapters:
        model.load_state_dict(start, strict=False)  # overwrites the initial magnitudes


class AdapterReference:
    """The policy without adapters, or with its initial ones: no second copy of the weights."""

    def __init__(self, policy: TransformerDecoder, *, keep_start: bool = False) -> None:
        self._policy = policy
        self._start = self._copy() if keep_start else None

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see :func:`trajectory_logprobs`."""
        adapters = disable_adapter(self._policy) if self._start is None else self._as_at_start()
        with adapters:
            return trajectory_logprobs(self._policy, micro_batches, temperature=temperature)

    def shard(self, settings: DistributedConfig, *, device: torch.device) -> None:
        if self._start is not None:
            pairs = zip(self._start, self._parameters(), strict=True)
            self._start = [sharded_like(parameter, value) for value, parameter in pairs]

    def _parameters(self) -> list[Tensor]:
        reshard(self._policy)  # the weights that a pass has gathered are not the trained ones
        return list(get_adapter_params(self._policy).values())

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters()]

    @contextmanager
    def _as_at_start(self) -> Iterator[None]:
        assert self._start is not None
        now = self._copy()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value)


class FrozenReference:
    """A frozen copy of the policy as it is now, for full fine-tuning."""

    def __init__(self, policy: TransformerDecoder) -> None:
        self._model = copy.deepcopy(policy).requires_grad_(False).eval()

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see :func:`trajectory_logprobs`."""
        return trajectory_logprobs(self._model, micro_batches, temperature=temperature)

    def shard(self, settings: DistributedConfig, *, device: torch.device) -> None:
        """Shard the copy; see :func:`torchtune_grpo.machine.parallel.shard`."""
        shard(self._model, settings, device=device)


Reference = AdapterReference | FrozenReference


def make_reference(policy: TransformerDecoder, cfg: GRPOConfig) -> Reference:
    """Pick the cheapest exact reference for a policy that was just loaded."""
    if get_adapter_params(policy):
        return AdapterReference(policy, keep_start=cfg.adapter_dir is not None)
    return FrozenReference(policy)


def check_model(cfg: GRPOConfig) -> None:
    """Check the model's files, the model, its adapter, the optimizer and the schedule."""
    problems = Problems()
    with problems.noted():
        _check_files(cfg)
        model = empty_model(cfg)
        _check_architecture(cfg, model)
        if cfg.adapter_dir is not None:
            _check_adapter_dir(cfg, model)
    with problems.noted():
        _check_optimizer(cfg)
    problems.raise_any()


def _check_optimizer(cfg: GRPOConfig) -> None:
    """Make the optimizer and its schedule, and take a step on the run's device, if present."""
    has_card = cfg.device != "cpu" and torch.cuda.is_available()
    weight = nn.Parameter(torch.zeros(2, 2, device=cfg.device if has_card else "cpu"))
    optimizer = instantiate("optimizer", cfg.optimizer, [weight])
    make_lr_scheduler(cfg, optimizer)
    # torchao compiles a step for each shape, which is slow.
    if (has_card or cfg.device == "cpu") and not type(optimizer).__module__.startswith("torchao"):
        weight.grad = torch.zeros_like(weight)
        try:
            optimizer.step()
        except Exception as error:
            raise ValueError(
                f"optimizer._component_={cfg.optimizer._component_}: cannot take a step: "
                f"{describe(error)}; give another optimizer or other arguments."
            ) from error


def _check_files(cfg: GRPOConfig) -> None:
    node = cfg.checkpointer
    key = "model_dir" if node.checkpoint_dir == cfg.model_dir else "checkpointer.checkpoint_dir"
    folder = Path(node.checkpoint_dir)
    download = f"`tune download <model> --output-dir {folder}` fetches a model from the hub"
    for path in (folder, folder / "config.json"):
        if not path.exists():
            raise ValueError(f"{key}={folder}: {path} does not exist; {download}.")
    for name in ("path", "merges_file", "special_tokens_path"):
        file = cfg.tokenizer.get(name)
        if file is not None and not Path(file).is_file():
            raise ValueError(f"tokenizer.{name}={file}: no such file; {download}.")
    with tempfile.TemporaryDirectory() as output_dir:
        instantiate("checkpointer", node, output_dir=output_dir)


def _check_architecture(cfg: GRPOConfig, model: nn.Module) -> None:
    """Compare the model with the checkpoint's ``config.json``."""
    folder, component = cfg.checkpointer.checkpoint_dir, cfg.model._component_
    if not isinstance(model, TransformerDecoder):
        raise ValueError(
            f"model._component_={component}: makes a {type(model).__name__}; only text models "
            "(torchtune's TransformerDecoder) can be trained."
        )
    if any(type(module).__name__ == "Gemma2Attention" for module in model.modules()):
        raise ValueError(
            f"model._component_={component}: torchtune 0.6.1 computes another model than Gemma 2's "
            "weights are for (the norms around its feed-forward are swapped, and logits are capped "
            "before the output projection); train another model."
        )
    hf_config = hf_config_of(cfg.checkpointer)
    theirs, ours = str(hf_config.get("model_type", "")), cfg.checkpointer.get("model_type")
    family = re.match("[A-Za-z]*", ours or theirs)
    if theirs and family and not theirs.startswith(family[0].lower()):
        raise ValueError(
            f"checkpointer.model_type={ours}: config.json in {folder} says {theirs}; give the type "
            "of that model."
        )
    built = {
        "vocab_size": model.tok_embeddings.num_embeddings,
        "hidden_size": model.tok_embeddings.embedding_dim,
        "num_hidden_layers": len(model.layers),
    }
    for layer in list(model.layers)[:1]:
        built["num_attention_heads"] = layer.attn.num_heads
        built["num_key_value_heads"] = layer.attn.num_kv_heads
    given = {key: value for key, value in cfg.model.items() if key != "_component_"}
    for name, value in built.items():
        if hf_config.get(name) not in (None, value):
            raise ValueError(
                f"model: {component} with {given} has {name}={value}, but config.json in "
                f"{folder} says {hf_config[name]}. Build the model that was downloaded."
            )
    width = built["hidden_size"]
    if any(getattr(module, "rank", 0) > width for module in model.modules()):
        raise ValueError(f"model: lora_rank is above the model's width of {width}; lower it.")
    size = built["vocab_size"]
    if any(token >= size for token in cfg.sampling.suppressed_tokens):
        raise ValueError(
            f"sampling.suppressed_tokens={list(cfg.sampling.suppressed_tokens)}: the model's "
            f"vocabulary has {size} tokens; give numbers from 0 to {size - 1}."
        )


def _check_adapter_dir(cfg: GRPOConfig, model: nn.Module) -> None:
    """Check that ``adapter_dir`` fits the model, and warn if it was trained on another base."""
    adapter_dir, base = str(cfg.adapter_dir), Path(cfg.checkpointer.checkpoint_dir).resolve()
    file = adapter_files(adapter_dir)[0].resolve()
    if file.parent == base or (base in file.parents and (base / "run_config.json").is_file()):
        raise ValueError(
            f"adapter_dir={adapter_dir}: the weights in checkpointer.checkpoint_dir={base} hold "
            "this adapter already; set it to null, or give the base that it was trained on."
        )
    check_adapter(adapter_dir, model)
    settings = read_json(file.parent, file.name, key="adapter_dir")
    trained_on = settings.get("base_model_name_or_path")
    here = hub_name(base)
    if trained_on and here and trained_on != here and not Path(trained_on).exists():
        message = f"adapter_dir={adapter_dir}: trained on {trained_on}, but {base} holds {here}."
        utils.log_rank_zero(log, message, level=logging.WARNING)


def longest_prompt(cfg: GRPOConfig, *, model: Any) -> int:
    """Return the most tokens that a prompt may have if a response is to fit after it."""
    rooms = [model.max_seq_len, (cfg.forward_token_budget or model.max_seq_len) + 1]
    return int(min(rooms)) - cfg.max_generated_tokens


def check_prompts(
    cfg: GRPOConfig, key: str, prompts: Sequence[Sequence[int]], *, model: Any
) -> None:
    """Check that prompts and responses fit the model's context and vocabulary, and the budget.

    ``prompts`` are the tokenized prompts of the data set under ``key``. The model may be on the
    meta device.
    """
    longest, highest_token = max(map(len, prompts)), max(max(each, default=0) for each in prompts)
    context, size = model.max_seq_len, model.tok_embeddings.num_embeddings
    response = cfg.max_generated_tokens
    if longest + response > context:
        shorter = "shorten the prompt" if key == "prompts" else f"{key}.max_prompt_tokens"
        raise ValueError(
            f"max_generated_tokens={response}: with the longest prompt of {key}, {longest} tokens, "
            f"it exceeds the model's context of {context}; lower it, or {shorter}."
        )
    row = longest + response - 1  # the last token is not read
    if key == "dataset" and cfg.forward_token_budget is not None and row > cfg.forward_token_budget:
        raise ValueError(
            f"forward_token_budget={cfg.forward_token_budget}: the longest prompt and response "
            f"make a row of {row} tokens; give at least {row}, or lower dataset.max_prompt_tokens "
            "or max_generated_tokens."
        )
    if highest_token >= size:
        raise ValueError(
            f"tokenizer: prompts of {key} have the token {highest_token}, but the model's "
            f"vocabulary has {size} tokens. Give the model's own tokenizer, or resize the model's "
            "embeddings with transformers (resize_token_embeddings)."
        )
