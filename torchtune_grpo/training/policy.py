"""Building the policy from a config and a checkpoint's weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtune import config, training, utils
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.device import fits_every_rank
from torchtune_grpo.machine.parallel import world_size
from torchtune_grpo.models import adapter_settings, merge_adapter, read_adapter, standardize
from torchtune_grpo.training import attend_in_segments

log = utils.get_logger("INFO")


def should_shard(cfg: GRPOConfig, *, device: torch.device) -> bool:
    """Whether the model is spread over the ranks; the same answer on all of them.

    ``distributed.sharding: auto`` shards what is trained as a whole, and a frozen base with
    adapters where its weights would take more than half of a rank's free memory. One rank alone has
    nobody to share with.

    Nothing is allocated to find out.
    """
    if world_size() == 1:
        return False
    if cfg.distributed.sharding != "auto":
        return cfg.distributed.sharding == "always"
    with training.set_default_dtype(training.get_dtype(cfg.dtype, device=device)):
        model = empty_model(cfg)
    if not get_adapter_params(model):
        return True
    if fits_every_rank(model, device=device):
        return False
    utils.log_rank_zero(log, "A rank's memory does not hold the whole model: it is sharded.")
    return True


def empty_model(cfg: GRPOConfig) -> TransformerDecoder:
    """``cfg.model`` on the meta device, where its weights take no memory.

    Raises:
        ValueError: naming the argument, if the builder refuses it.
    """
    with torch.device("meta"):
        return instantiate("model", cfg.model)


def build_policy(
    cfg: GRPOConfig, state_dict: Mapping[str, Any], *, device: torch.device
) -> TransformerDecoder:
    """Builds ``cfg.model`` with the given weights; only adapters are trained where there are some.

    ``cfg.adapter_dir`` is loaded into them, or merged into a model without.

    Args:
        cfg (GRPOConfig): the config.
        state_dict (Mapping[str, Any]): full weights, as Checkpoints.base_weights reads them.
        device (torch.device): where the model is made.

    Returns:
        TransformerDecoder: in ``cfg.dtype``, with adapters in float32.

    Raises:
        ValueError: if the weights are not those of the model, or if its attention takes no packed
            rows.
    """
    # torchtune's RMSNorm means it: float32 inside, whatever the weights are.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    dtype = training.get_dtype(cfg.dtype, device=device)
    with training.set_default_dtype(dtype), device:
        model = config.instantiate(cfg.model)
    standardize(model)
    if cfg.pack_groups:
        attend_in_segments(model)
    adapters = get_adapter_params(model)
    start = _start(cfg) if cfg.adapter_dir is not None else {}
    if start and not adapters:
        lora = adapter_settings(str(cfg.adapter_dir))
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
        model.load_state_dict(start, strict=False)  # behind the magnitudes' start
        set_trainable_params(model, adapters)
    return model


def _start(cfg: GRPOConfig) -> dict[str, Tensor]:
    file = Path(cfg.checkpointer.checkpoint_dir, "config.json")
    hf_config = json.loads(file.read_text(encoding="utf-8"))
    return read_adapter(str(cfg.adapter_dir), hf_config=hf_config)
