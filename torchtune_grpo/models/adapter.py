"""LoRA and DoRA adapters: read from PEFT's or torchtune's files, merged, and saved for PEFT."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt

from torchtune_grpo.config.text import ConfigError, read_json
from torchtune_grpo.models.families import family_of
from torchtune_grpo.models.kinds import kind_of
from torchtune_grpo.models.layers import reorder

_LEAF_NAMES = {  # PEFT's -> torchtune's
    "lora_A.weight": "lora_a.weight",
    "lora_B.weight": "lora_b.weight",
    "lora_magnitude_vector": "magnitude",
}
_PEFT_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?(layers\.\d+\.)?(.+)\."
    r"(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)(?:\.weight)?"
)
CONFIG_FILE = "adapter_config.json"
# torchtune's recipes save both; their PEFT form of DoRA has the rows of magnitudes out of order.
_TORCHTUNES = "adapter_model.pt"
_WEIGHT_FILES = (_TORCHTUNES, "adapter_model.safetensors", "adapter_model.bin")
# PEFT's settings that are read, and those that do not change what an adapter computes
_REQUIRED = (("peft_type", "LORA"), ("bias", "none"))
_READ = {"r", "lora_alpha", "use_rslora", "use_dora"}
_WITHOUT_EFFECT = {
    *("target_modules", "exclude_modules", "lora_dropout", "task_type", "inference_mode"),
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "eva_config"),
    *("megatron_core", "qalora_group_size", "loftq_config", "corda_config", "runtime_config"),
    "ensure_weight_tying",
}
# Initializations that change the base's weights, too
_CHANGES_BASE = re.compile("pissa|olora|corda|loftq|lora_ga")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "output_proj"), {"w1", "w2", "w3"}


def adapter_files(folder: str | Path) -> tuple[Path, Path]:
    """Find the settings and weights files of the adapter in a folder or its ``adapter`` folder."""
    for place in (Path(folder), Path(folder) / "adapter"):
        weights = [place / name for name in _WEIGHT_FILES if (place / name).is_file()]
        if (place / CONFIG_FILE).is_file() and weights:
            return place / CONFIG_FILE, weights[0]
    raise ValueError(
        f"adapter_dir={folder}: has no adapter; name a folder with {CONFIG_FILE} and "
        "adapter_model.safetensors, as PEFT and torchtune's recipes save them."
    )


def adapter_settings(folder: str | Path, *, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of torchtune's builders for an adapter.

    ``hf_config`` is the base's config.json. Raises a ValueError if torchtune's modules cannot
    compute the adapter.
    """
    file, _ = adapter_files(folder)
    given = read_json(file.parent, file.name, key="adapter_dir")
    _refuse_unsupported(folder, given)
    tensors = _read_tensors(folder, hf_config)
    rank: Any = given.get("r")
    ranks = {len(value) for name, value in tensors.items() if name.endswith("lora_a.weight")}
    if ranks != {rank}:
        raise ValueError(f"adapter_dir={folder}: {file.name} says r={rank}, the weights {ranks}.")
    use_dora = bool(given.get("use_dora")) or any(name.endswith(".magnitude") for name in tensors)
    leaves = ["lora_a.weight", "lora_b.weight", *(["magnitude"] if use_dora else [])]
    odd = {f"{name}.{leaf}" for name in _modules(tensors) for leaf in leaves} ^ tensors.keys()
    if odd:
        raise ValueError(
            f"adapter_dir={folder}: incomplete adapter: {min(odd)} is missing or unexpected."
        )
    alpha = float(given.get("lora_alpha", 8))  # PEFT's default
    if given.get("use_rslora"):
        alpha *= math.sqrt(rank)
    lora = {"lora_rank": rank, "lora_alpha": alpha, "use_dora": use_dora}
    return _targets(_modules(tensors)) | lora


def check_adapter(folder: str | Path, model: nn.Module, *, hf_config: Mapping[str, object]) -> None:
    """Raise a ConfigError if an adapter does not fit a model, which may be on the meta device.

    ``hf_config`` is the base's config.json.
    """
    tensors = _read_tensors(folder, hf_config)
    wanted = adapter_settings(folder, hf_config=hf_config)
    if modules := adapted_modules(model):
        built = model_settings(model) | _targets(set(modules))
        differing = [
            f"model.{key}={built[key]}: adapter_dir={folder} has {value}; set it to that."
            for key, value in wanted.items()
            if built[key] != value
            and not (key == "lora_alpha" and math.isclose(built[key], value, rel_tol=1e-6))
        ]
        if differing:
            raise ConfigError(*differing)
    weights = dict(model.named_parameters())
    for name in sorted(_modules(tensors)):
        a, b = tensors[f"{name}.lora_a.weight"], tensors[f"{name}.lora_b.weight"]
        weight, shape = weights.get(f"{name}.weight"), [len(b), a.shape[1]]
        if weight is None or list(weight.shape) != shape:
            found = "none" if weight is None else f"of {list(weight.shape)}"
            raise ValueError(
                f"adapter_dir={folder}: adapts a {name} of {shape}, and the model's is {found}; "
                "give the model that the adapter was trained on."
            )


def read_adapter(folder: str | Path, *, hf_config: Mapping[str, object]) -> dict[str, Tensor]:
    """Read an adapter's weights with torchtune's names; ``hf_config`` is the base's config.json."""
    tensors = _read_tensors(folder, hf_config)
    is_torchtunes = adapter_files(folder)[1].name == _TORCHTUNES
    if is_torchtunes and hf_config.get("model_type") not in ("qwen2", "phi3"):
        return reorder(tensors, hf_config, to="halves")
    return tensors


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
    return {_unwrapped(name) for name in get_adapter_params(model)}


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    modules = model.named_modules()
    return {
        _unwrapped(name): module for name, module in modules if hasattr(module, "adapter_params")
    }


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
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))


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
    first = next(iter(adapted_modules(model).values()))
    rank, use_dora = first.lora_a.weight.shape[0], hasattr(first, "magnitude")
    alpha = first.scaling * rank if use_dora else first.alpha
    shape = {"lora_rank": rank, "lora_alpha": alpha, "use_dora": use_dora}
    return shape | {"quantize_base": first._quantize_base}


def _refuse_unsupported(folder: str | Path, given: Mapping[str, object]) -> None:
    for key, value in given.items():
        if key == "init_lora_weights":
            is_supported = not _CHANGES_BASE.match(str(value))
        else:
            is_known = key in _READ or key in _WITHOUT_EFFECT
            is_supported = not value or is_known or (key, value) in _REQUIRED
        if not is_supported:
            raise ValueError(
                f"adapter_dir={folder}: {CONFIG_FILE} says {key}={value!r}, which is not "
                "supported; merge the adapter into the base with PEFT (merge_and_unload), and "
                "begin from the result."
            )


def _read_tensors(folder: str | Path, hf_config: Mapping[str, object]) -> dict[str, Tensor]:
    """Read an adapter's weights under torchtune's names, in the file's order of rows."""
    _, file = adapter_files(folder)
    if file.suffix == ".safetensors":
        tensors = load_file(file)
    else:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if file.name == _TORCHTUNES:
        return tensors
    parts = family_of(hf_config).parts.items()
    modules = {theirs: ours for theirs, (ours, *others) in parts if not others}
    result = {}
    for name, value in tensors.items():
        match = _PEFT_NAME.fullmatch(name)
        if match is None or match[2] not in modules:
            raise ValueError(
                f"adapter_dir={folder}: {file.name} has {name}, which is not a LoRA or DoRA weight "
                f"of {', '.join(modules)}; if the base has it, save with "
                "save_embedding_layers=False, or else merge the adapter into the base with PEFT "
                "(merge_and_unload), and begin from the result."
            )
        result[f"{match[1] or ''}{modules[match[2]]}.{_LEAF_NAMES[match[3]]}"] = value
    return result


def _modules(names: Mapping[str, object]) -> set[str]:
    """Return the adapted modules, given the names of an adapter's weights."""
    end = ".lora_a.weight"
    return {name.removesuffix(end) for name in names if name.endswith(end)}


def _targets(modules: set[str]) -> dict[str, object]:
    """Return the builders' arguments that say which modules are adapted."""
    leaves = {name.rpartition(".")[2] for name in modules}
    return {
        "lora_attn_modules": [name for name in _ATTENTION if name in leaves],
        "apply_lora_to_mlp": bool(leaves & _MLP),  # what the adapter lacks starts at 0
        "apply_lora_to_output": "output" in leaves,
    }


def _unwrapped(name: str) -> str:
    """Return a parameter's name without the part that activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")
