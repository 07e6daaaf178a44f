"""The policy, built from a config and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torchtune import config, training, utils
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.device import free_bytes, weight_bytes
from torchtune_grpo.machine.parallel import gather_over_ranks, world_size
from torchtune_grpo.models.kinds import kind_of
from torchtune_grpo.models.layers import attend_in_segments, standardize

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
    """Build ``cfg.model`` on the meta device, where its weights take no memory."""
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
    if cfg.pack_groups and kind_of(model).packs_rows:
        attend_in_segments(model)
    if adapters := get_adapter_params(model):
        set_trainable_params(model, adapters)
    return model


def load_policy(
    model: TransformerDecoder, cfg: GRPOConfig, state_dict: Mapping[str, object]
) -> None:
    """Load a checkpoint's full weights into a model from ``make_policy``."""
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
    kind_of(model).check_loaded()
