"""Building the policy from a config and a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchtune import config, training
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_grpo.config import GRPOConfig


def has_adapters(cfg: GRPOConfig) -> bool:
    """Whether ``cfg.model`` trains adapters only; nothing is allocated."""
    with torch.device("meta"):
        return bool(get_adapter_params(config.instantiate(cfg.model)))


def build_policy(
    cfg: GRPOConfig, state_dict: Mapping[str, Any], *, device: torch.device
) -> TransformerDecoder:
    """Builds ``cfg.model`` with the given weights; only adapters are trained where there are some.

    Args:
        cfg (GRPOConfig): the config.
        state_dict (Mapping[str, Any]): full weights in torchtune's names, adapters or not.
        device (torch.device): where the model is made.

    Returns:
        TransformerDecoder: in ``cfg.dtype``.

    Raises:
        ValueError: if the weights are not those of the model.
    """
    with training.set_default_dtype(training.get_dtype(cfg.dtype, device=device)), device:
        model = config.instantiate(cfg.model)
    adapters = get_adapter_params(model)
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
        set_trainable_params(model, adapters)
    return model
