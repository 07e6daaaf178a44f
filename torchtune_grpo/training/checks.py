"""Checks of a config against its model's files, before weights are read."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.check import arguments_of, instantiate
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import ConfigError, describe, noted
from torchtune_grpo.models.kinds import hf_config_of, kind_of
from torchtune_grpo.rollout.engine import capabilities_of, engine_for
from torchtune_grpo.training.optimizer import make_lr_scheduler
from torchtune_grpo.training.policy import empty_model


def check_model(cfg: GRPOConfig) -> None:
    """Check the model's files, the model, its adapter, the optimizer and the schedule."""
    problems: list[str] = []
    with noted(problems):
        _check_files(cfg)
        model = empty_model(cfg)
        _check_architecture(cfg, model)
        engine_for(cfg.rollout, model)
    with noted(problems):
        _check_optimizer(cfg)
    if problems:
        raise ConfigError(*problems)


def _check_optimizer(cfg: GRPOConfig) -> None:
    """Make the optimizer and its schedule, and take a step on the run's device, if present."""
    has_card = cfg.device != "cpu" and torch.cuda.is_available()
    weight = nn.Parameter(torch.zeros(2, 2, device=cfg.device if has_card else "cpu"))
    optimizer = instantiate("optimizer", cfg.optimizer, [weight])
    make_lr_scheduler(cfg, optimizer)
    # torchao compiles a step for each shape, which is slow.
    if (has_card or cfg.device == "cpu") and not hasattr(optimizer, "_new_buffer"):
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
    if folder.suffix == ".gguf":
        download = f"give {folder.parent}, the folder of the GGUF"
    for path in (folder, folder / "config.json"):
        if not path.exists():
            raise ValueError(f"{key}={folder}: {path} does not exist; {download}.")
    for name in ("path", "merges_file", "special_tokens_path"):
        file = cfg.tokenizer.get(name)
        if file is not None and not Path(file).is_file():
            raise ValueError(f"tokenizer.{name}={file}: no such file; {download}.")
    with tempfile.TemporaryDirectory() as output_dir:
        instantiate("checkpointer", node, output_dir=output_dir)


def _check_architecture(cfg: GRPOConfig, model: TransformerDecoder) -> None:
    """Compare the model with the checkpoint's ``config.json``."""
    folder, component = cfg.checkpointer.checkpoint_dir, cfg.model._component_
    shape = kind_of(model).shape()
    if any(isinstance(module, Gemma2Attention) for module in model.modules()):
        raise ValueError(
            f"model._component_={component}: torchtune 0.6.1 computes another model than Gemma 2's "
            "weights are for (the norms around its feed-forward are swapped, and logits are capped "
            "before the output projection); set it to torchtune_grpo.models.hf_model."
        )
    hf_config = hf_config_of(cfg.checkpointer)
    theirs, ours = str(hf_config.get("model_type", "")), cfg.checkpointer.get("model_type")
    family = re.match("[A-Za-z]*", ours or theirs)
    if theirs and family and not theirs.startswith(family[0].lower()):
        raise ValueError(
            f"checkpointer.model_type={ours}: config.json in {folder} says {theirs}; give the type "
            "of that model."
        )
    given = arguments_of(cfg.model)
    for name, value in shape.items():
        if hf_config.get(name) not in (None, value):
            raise ValueError(
                f"model: {component} with {given} has {name}={value}, but config.json in "
                f"{folder} says {hf_config[name]}. Build the model that was downloaded."
            )
    if any(getattr(module, "rank", 1) < 1 for module in model.modules()):
        raise ValueError("model.lora_rank=0: give 1 or more.")


def check_prompts(
    cfg: GRPOConfig, key: str, prompts: Sequence[Sequence[int]], *, model: TransformerDecoder
) -> None:
    """Check that prompts and responses fit the model's context and vocabulary.

    ``prompts`` are the tokenized prompts of the data set under ``key``. The model may be on the
    meta device.
    """
    longest, highest = max(map(len, prompts)), max(max(p, default=0) for p in prompts)
    context, size = model.max_seq_len, model.tok_embeddings.num_embeddings
    response = cfg.max_response_tokens
    limited = "max_generated_tokens"
    if response != cfg.max_generated_tokens:
        limited = "environment.max_response_tokens"
    if longest + response > context:
        shorter = f"{key}.max_prompt_tokens" if key.endswith("dataset") else "shorten the prompt"
        raise ValueError(
            f"{limited}={response}: with the longest prompt of {key}, {longest} tokens, "
            f"it exceeds the model's context of {context}; lower it, or {shorter}."
        )
    most = capabilities_of(cfg.rollout).longest_row
    if most is not None and longest + response > most:
        raise ValueError(
            f"rollout.engine: takes at most {most} tokens of a prompt and its response, and the "
            f"longest prompt of {key} and its response may have {longest + response}; raise the "
            f"engine's limit, or lower {limited}."
        )
    if highest >= size:
        raise ValueError(
            f"tokenizer: prompts of {key} have the token {highest}, but the model's "
            f"vocabulary has {size} tokens. Give the model's own tokenizer, or resize the model's "
            "embeddings with transformers (resize_token_embeddings)."
        )
