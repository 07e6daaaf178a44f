"""Weights in the formats that others load: merged, and as PEFT's adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torchtune import utils
from torchtune.modules.peft import DoRALinear, get_adapter_params, get_merged_lora_ckpt

log = utils.get_logger("INFO")

# torchtune's model types whose query and key rows are in Hugging Face's own order already.
_UNPERMUTED = ("QWEN2", None)  # None: models of torchtune_grpo.models
_PEFT_UNSUPPORTED = ("PHI3_MINI", "PHI4")

# torchtune's name of a linear module in a layer, and Hugging Face's.
LINEAR_NAMES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "output": "lm_head",
}
PEFT_LEAVES = {
    "lora_a.weight": "lora_A.weight",
    "lora_b.weight": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}


def fits_peft(model: nn.Module, model_type: str | None) -> bool:
    """Whether PEFT can compute what a model's adapters do; if not, the log says why."""
    reason = None
    if model_type in _PEFT_UNSUPPORTED:
        reason = f"{model_type} fuses the projections that PEFT adapts one by one"
    elif any(scales_bias(module) for module in adapter_modules(model).values()):
        reason = "torchtune's DoRA scales the bias of a layer, PEFT's does not"
    if reason is not None:
        log.warning(f"No adapter in PEFT's format ({reason}); the merged weights are complete.")
    return reason is None


def adapter_names(model: nn.Module) -> set[str]:
    """Names of a model's adapter parameters in its state; empty without adapters."""
    return {name.replace("_checkpoint_wrapped_module.", "") for name in get_adapter_params(model)}


def adapter_modules(model: nn.Module) -> dict[str, Any]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): module
        for name, module in model.named_modules()
        if hasattr(module, "adapter_params")
    }


def rank_and_alpha(modules: Mapping[str, Any]) -> tuple[int, float]:
    """The rank and alpha that torchtune's builders give to all adapters of a model."""
    first = next(iter(modules.values()))
    rank = first.lora_a.weight.shape[0]
    return rank, first.scaling * rank if hasattr(first, "scaling") else first.alpha


def scales_bias(module: Any) -> bool:
    """torchtune's DoRA multiplies a layer's bias by the magnitude too; PEFT's leaves it alone."""
    is_dora = isinstance(module, DoRALinear)
    return is_dora and getattr(module, "scales_bias", True) and module.bias is not None


def has_own_rows(model_type: str | None) -> bool:
    """Whether a model of torchtune's model type has another order of rows than Hugging Face."""
    return model_type not in _UNPERMUTED


def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's whole weights with its LoRA or DoRA adapters merged in.

    The adapted weights are copied first: torchtune's merge adds in place, which on a CPU would
    change the live model.
    """
    modules = adapter_modules(model)
    dtypes = {name: value.dtype for name, value in state.items()}  # adapters may be wider
    state = dict(state)
    for name in modules:
        state[f"{name}.weight"] = state[f"{name}.weight"].clone()
    for name, module in modules.items():
        if scales_bias(module):
            magnitude = state[f"{name}.magnitude"]
            weight = state[f"{name}.weight"].to(magnitude.dtype)
            lora = state[f"{name}.lora_b.weight"] @ state[f"{name}.lora_a.weight"]
            scale = magnitude / (weight + module.scaling * lora).norm(dim=1)
            state[f"{name}.bias"] = state[f"{name}.bias"] * scale
    rank, alpha = rank_and_alpha(modules)
    merged = get_merged_lora_ckpt(state, rank=rank, alpha=alpha)
    return {name: value.to(dtypes[name]) for name, value in merged.items()}


def peft_config(model: nn.Module, *, base_model: str) -> dict[str, Any]:
    """The ``adapter_config.json`` that PEFT needs to load a model's adapters."""
    modules = adapter_modules(model)
    rank, alpha = rank_and_alpha(modules)
    leaves = {LINEAR_NAMES[re.sub(r"^layers\.\d+\.", "", name)].split(".")[-1] for name in modules}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "use_dora": any(name.endswith("magnitude") for name in get_adapter_params(model)),
        "target_modules": sorted(leaves),
    }


def peft_state(
    adapter: Mapping[str, Tensor], *, hf_config: Mapping[str, Any], model_type: str | None
) -> dict[str, Tensor]:
    """Adapter parameters in PEFT's names and Hugging Face's order of rows.

    They come in torchtune's names; ``hf_config`` is the base model's config.json, and
    ``model_type`` torchtune's, such as "LLAMA3_2", or None. The result is what
    ``adapter_model.safetensors`` holds.
    """
    if has_own_rows(model_type):
        adapter = rows_to_hf(adapter, hf_config=hf_config)
    result = {}
    for name, value in adapter.items():
        match = re.fullmatch(r"(layers\.\d+\.)?(.+?)\.(lora_[ab]\.weight|magnitude)", name)
        assert match is not None, name
        layer, module, leaf = match.groups()
        prefix = f"base_model.model.model.{layer}" if layer else "base_model.model."
        result[f"{prefix}{LINEAR_NAMES[module]}.{PEFT_LEAVES[leaf]}"] = value.contiguous()
    return result


def rows_to_hf(adapter: Mapping[str, Tensor], *, hf_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rotary pairs side by side (torchtune) -> in two halves (Hugging Face), head by head.

    Args:
        adapter (Mapping[str, Tensor]): in torchtune's names.
        hf_config (Mapping[str, Any]): the base model's config.json.
    """
    return _reordered(adapter, hf_config, lambda heads: heads.unflatten(1, (-1, 2)))


def rows_to_tune(
    adapter: Mapping[str, Tensor], *, hf_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The reverse of :func:`rows_to_hf`."""
    return _reordered(adapter, hf_config, lambda heads: heads.unflatten(1, (2, -1)))


def _reordered(
    adapter: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    split: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Transposes what ``split`` makes of each head's rows [heads, head_dim, ...] of q and k."""
    heads = {
        "q_proj": hf_config["num_attention_heads"],
        "k_proj": hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"],
    }
    result = dict(adapter)
    for name, value in adapter.items():
        match = re.search(r"\.(q_proj|k_proj)\.(lora_b\.weight|magnitude)$", name)
        if match is not None:
            rows = split(value.unflatten(0, (heads[match[1]], -1)))
            result[name] = rows.transpose(1, 2).reshape(value.shape)
    return result
