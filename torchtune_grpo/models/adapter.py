"""An adapter to begin with, as PEFT, torchtune's recipes or an earlier run have left it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchtune.modules.peft import get_merged_lora_ckpt

from torchtune_grpo.config.errors import ConfigError
from torchtune_grpo.config.text import read_json
from torchtune_grpo.models.export import (
    LINEAR_NAMES,
    PEFT_LEAVES,
    adapter_modules,
    has_own_rows,
    rank_and_alpha,
    rows_to_hf,
    rows_to_tune,
    scales_bias,
)

CONFIG_FILE = "adapter_config.json"
_TORCHTUNES = "adapter_model.pt"  # its names and order of rows; exact where its PEFT form is not
_WEIGHT_FILES = (_TORCHTUNES, "adapter_model.safetensors", "adapter_model.bin")
# Of PEFT's settings, those that are read, and those that do not say what an adapter computes.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "bias"}
_HARMLESS = {
    *("target_modules", "exclude_modules", "lora_dropout", "task_type", "inference_mode"),
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "eva_config"),
    *("megatron_core", "qalora_group_size", "loftq_config", "corda_config", "runtime_config"),
    "ensure_weight_tying",
}
# These make other base weights, too.
_OTHER_BASE = re.compile("pissa|olora|corda|loftq|lora_ga")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "output_proj"), {"w1", "w2", "w3"}
_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?(layers\.\d+\.)?(.+)\."
    r"(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)(?:\.weight)?"
)


def adapter_files(folder: str | Path) -> tuple[Path, Path]:
    """An adapter's settings and its weights, in a folder or in ``adapter`` there.

    Raises:
        ValueError: if the folder holds no adapter.
    """
    for place in (Path(folder), Path(folder) / "adapter"):
        weights = [place / name for name in _WEIGHT_FILES if (place / name).is_file()]
        if (place / CONFIG_FILE).is_file() and weights:
            return place / CONFIG_FILE, weights[0]
    raise ValueError(
        f"adapter_dir={folder}: holds no adapter; name a folder with {CONFIG_FILE} and "
        "adapter_model.safetensors, as PEFT and torchtune's recipes save them."
    )


def adapter_settings(folder: str | Path) -> dict[str, Any]:
    """What an adapter asks of torchtune's builders, by the names of their arguments.

    Args:
        folder (str | Path): PEFT's, an epoch of torchtune's recipes, or a checkpoint of a run.

    Returns:
        dict[str, Any]: ``lora_attn_modules``, ``apply_lora_to_mlp``, ``apply_lora_to_output``,
        ``lora_rank``, ``lora_alpha``, ``use_dora``.

    Raises:
        ValueError: if there is none, or it holds what torchtune's modules cannot compute.
    """
    file, _ = adapter_files(folder)
    given = read_json(file.parent, file.name, key="adapter_dir")
    _refuse_unsupported(folder, given)
    tensors = _tensors(folder)
    rank: Any = given.get("r")
    ranks = {len(value) for name, value in tensors.items() if name.endswith("lora_a.weight")}
    if ranks != {rank}:
        raise ValueError(f"adapter_dir={folder}: {file.name} says r={rank}, the weights {ranks}.")
    use_dora = bool(given.get("use_dora")) or any("magnitude" in name for name in tensors)
    leaves = ["lora_a.weight", "lora_b.weight", *(["magnitude"] if use_dora else [])]
    expected = {f"{module}.{leaf}" for module in _modules(tensors) for leaf in leaves}
    if expected != tensors.keys():
        odd = min(expected ^ tensors.keys())
        raise ValueError(f"adapter_dir={folder}: its weights are incomplete, as to {odd}.")
    alpha = float(given.get("lora_alpha", 8))  # PEFT's default
    if given.get("use_rslora"):
        alpha *= math.sqrt(rank)
    return {
        **_targets(_modules(tensors)),
        "lora_rank": rank,
        "lora_alpha": alpha,
        "use_dora": use_dora,
    }


def check_adapter(folder: str | Path, model: nn.Module) -> None:
    """Raises a ConfigError if an adapter cannot be loaded into a model, or merged into it.

    The model may be on the meta device.
    """
    tensors, wanted = _tensors(folder), adapter_settings(folder)
    modules = adapter_modules(model)
    if modules:
        rank, alpha = rank_and_alpha(modules)
        use_dora = any(hasattr(module, "magnitude") for module in modules.values())
        built = {"lora_rank": rank, "lora_alpha": float(alpha), "use_dora": use_dora}
        built |= _targets(set(modules))
        differing = [
            f"model.{key}={built[key]}: adapter_dir={folder} has {value}; set it to that."
            for key, value in wanted.items()
            if built[key] != value
            and not (key == "lora_alpha" and math.isclose(built[key], value, rel_tol=1e-6))
        ]
        if differing:
            raise ConfigError(differing)
    weights = dict(model.named_parameters())
    for name in sorted(_modules(tensors)):
        a, b = tensors[f"{name}.lora_a.weight"], tensors[f"{name}.lora_b.weight"]
        weight, shape = weights.get(f"{name}.weight"), [len(b), a.shape[1]]
        if weight is None or list(weight.shape) != shape:
            there = "none" if weight is None else f"of {list(weight.shape)}"
            raise ValueError(
                f"adapter_dir={folder}: adapts a {name} of {shape}, and the model's is {there}; "
                "give the model that the adapter was trained on."
            )
        scaled = adapter_files(folder)[1].name == _TORCHTUNES
        biased = wanted["use_dora"] and f"{name}.bias" in weights
        if biased and scaled != scales_bias(modules.get(name)):
            raise ValueError(
                f"adapter_dir={folder}: torchtune's DoRA scales the bias of a layer, PEFT's does "
                f"not, and {name} has one; take the builder that the adapter was trained with, or "
                "torchtune_grpo.models.lora_hf_model for one of PEFT's."
            )


def read_adapter(
    folder: str | Path, *, hf_config: Mapping[str, Any], model_type: str | None
) -> dict[str, Tensor]:
    """An adapter's weights in torchtune's names and the order of rows that a model has.

    Args:
        folder (str | Path): as :func:`adapter_settings` takes it.
        hf_config (Mapping[str, Any]): the base model's config.json.
        model_type (str | None): the checkpointer's, such as "LLAMA3_2".
    """
    is_own = has_own_rows(model_type)
    was_own = (
        adapter_files(folder)[1].name == _TORCHTUNES and hf_config.get("model_type") != "qwen2"
    )
    tensors = _tensors(folder)
    if was_own == is_own:
        return tensors
    return (rows_to_tune if is_own else rows_to_hf)(tensors, hf_config=hf_config)


def merge_adapter(
    state: Mapping[str, Any], adapter: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Weights with an adapter merged in; all in torchtune's names."""
    rank, alpha = settings["lora_rank"], settings["lora_alpha"]
    return get_merged_lora_ckpt({**state, **adapter}, rank=rank, alpha=alpha)


def _refuse_unsupported(folder: str | Path, given: Mapping[str, Any]) -> None:
    refused = [key for key in given if given[key] and key not in _READ | _HARMLESS]
    if given.get("peft_type") != "LORA":
        refused.append("peft_type")
    if given.get("bias", "none") != "none":
        refused.append("bias")
    if _OTHER_BASE.match(str(given.get("init_lora_weights"))):
        refused.append("init_lora_weights")
    if refused:
        told = ", ".join(f"{key}={given.get(key)!r}" for key in refused)
        raise ValueError(
            f"adapter_dir={folder}: {CONFIG_FILE} says {told}, which is not computed here; merge "
            "the adapter into the base with PEFT (merge_and_unload), and begin from the result."
        )


def _tensors(folder: str | Path) -> dict[str, Tensor]:
    """In torchtune's names, and the file's order of rows."""
    _, file = adapter_files(folder)
    if file.suffix == ".safetensors":
        tensors = load_file(file)
    else:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if file.name == _TORCHTUNES:
        return tensors
    modules = {theirs: ours for ours, theirs in LINEAR_NAMES.items()}
    leaves = {theirs: ours for ours, theirs in PEFT_LEAVES.items()}
    result = {}
    for name, value in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in modules:
            raise ValueError(
                f"adapter_dir={folder}: {file.name} holds {name}, which is no LoRA or DoRA weight "
                f"of {', '.join(modules)}; if the base has it, save with "
                "save_embedding_layers=False, or else merge the adapter into the base with PEFT "
                "(merge_and_unload), and begin from the result."
            )
        result[f"{match[1] or ''}{modules[match[2]]}.{leaves[match[3]]}"] = value
    return result


def _modules(names: Mapping[str, Any]) -> set[str]:
    """The adapted modules, by names of an adapter's weights."""
    return {name.removesuffix(".lora_a.weight") for name in names if "lora_a" in name}


def _targets(modules: set[str]) -> dict[str, Any]:
    """The builders' arguments that say which modules are adapted."""
    leaves = {name.rpartition(".")[2] for name in modules}
    return {
        "lora_attn_modules": [name for name in _ATTENTION if name in leaves],
        "apply_lora_to_mlp": bool(leaves & _MLP),  # what the adapter lacks begins at 0
        "apply_lora_to_output": "output" in leaves,
    }
