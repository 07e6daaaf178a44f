"""LoRA and DoRA adapters: merged, and saved for PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt

from torchtune_grpo.models.kinds import kind_of


def merge_adapter(state: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with its adapters merged into the weights, in the weights' dtype."""
    rank, alpha = settings["lora_rank"], settings["lora_alpha"]
    names = {f"{name}.weight" for name in _modules(state)}
    # torchtune adds in place, which on a CPU would change the live model.
    copied = {name: value.clone() if name in names else value for name, value in state.items()}
    merged = get_merged_lora_ckpt(copied, rank=rank, alpha=alpha)
    return {name: value.to(state[name].dtype) for name, value in merged.items()}


def adapter_names(model: nn.Module) -> set[str]:
    """Return the names of a model's adapter parameters in its state; empty without adapters."""
    # Without the part that activation checkpointing inserts
    return {name.replace("_checkpoint_wrapped_module.", "") for name in get_adapter_params(model)}


def save_adapter(
    folder: Path,
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    base_model: str,
    hf_config: Mapping[str, object],
) -> None:
    """Write the adapters in a model's ``state`` in the form that PEFT loads.

    A module that transformers fuses is adapted as one, with the ranks of its parts; for the parts
    that are not adapted the state needs their weights.
    """
    tensors, ranks, settings = dict[str, Tensor](), dict[str, int](), model_settings(model)
    for theirs, target, ours in kind_of(model).peft_modules(_modules(state), hf_config):
        joined = _joined(ours, state)
        tensors |= {f"base_model.model.{theirs}.{leaf}": value for leaf, value in joined.items()}
        if joined:
            ranks[target] = len(joined["lora_A.weight"])
    rank, alpha = settings["lora_rank"], settings["lora_alpha"]
    others = {name: own for name, own in ranks.items() if own != rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "use_dora": settings["use_dora"],
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: alpha * own / rank for name, own in others.items()},
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _joined(parts: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter of modules that are parts of one, by PEFT's names; empty without any."""
    adapted = _modules(state) & {*parts}
    if not adapted:
        return {}
    # What is not adapted gets no rank: [rows, 0].
    factors = [
        state[f"{part}.lora_b.weight"] if part in adapted else state[f"{part}.weight"][:, :0]
        for part in parts
    ]
    result = {"lora_B.weight": torch.block_diag(*factors)}
    result["lora_A.weight"] = torch.cat(
        [state[f"{p}.lora_a.weight"] for p in parts if p in adapted]
    )
    magnitudes = [state.get(f"{part}.magnitude") for part in parts]
    if any(magnitude is not None for magnitude in magnitudes):
        norms = [  # a part that is not adapted keeps its own
            state[f"{part}.weight"].float().norm(dim=1) if magnitude is None else magnitude
            for part, magnitude in zip(parts, magnitudes, strict=True)
        ]
        result["lora_magnitude_vector"] = torch.cat(norms)
    return result


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Return rank, alpha and kind of a model's adapters: torchtune's builders make all alike."""
    first: Any = next(m for m in model.modules() if hasattr(m, "adapter_params"))
    rank, use_dora = first.lora_a.weight.shape[0], hasattr(first, "magnitude")
    alpha = first.scaling * rank if use_dora else first.alpha
    shape = {"lora_rank": rank, "lora_alpha": alpha, "use_dora": use_dora}
    return shape | {"quantize_base": first._quantize_base}


def _modules(names: Mapping[str, object]) -> set[str]:
    """Return the adapted modules, given the names of an adapter's weights."""
    end = ".lora_a.weight"
    return {name.removesuffix(end) for name in names if name.endswith(end)}
