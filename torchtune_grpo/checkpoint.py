"""What is saved, so that a resumed run continues, and users can load the result elsewhere.

A checkpoint is a folder ``step_<n>`` that appears whole or not at all:

    step_000020/
        model-*.safetensors, config.json, tokenizer ...  merged weights, as transformers loads them
        adapter/adapter_model.safetensors, adapter_config.json    LoRA or DoRA in PEFT's format
        training_state.pt                                what resuming needs
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtune import config, training, utils
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt
from torchtune.training import FullModelHFCheckpointer

from torchtune_grpo.parallel import barrier, rank
from torchtune_grpo.whole_state import full_state

log = utils.get_logger("INFO")

STATE_FILE = "training_state.pt"
_STAGING = ".incomplete"
# torchtune's model types whose query and key rows are in Hugging Face's own order already.
_UNPERMUTED = ("QWEN2",)
_PEFT_UNSUPPORTED = ("PHI3_MINI", "PHI4")
_PEFT_NAMES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "output": "lm_head",
}
_PEFT_LEAVES = {
    "lora_a.weight": "lora_A.weight",
    "lora_b.weight": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}


def make_checkpointer(cfg: DictConfig, *, output_dir: Path, **overrides: Any) -> Any:
    """Builds the config's checkpointer so that it writes into the staging folder."""
    staging = output_dir / _STAGING
    return config.instantiate(cfg, output_dir=str(staging), **overrides)


def find_checkpoint(output_dir: Path) -> Path:
    """The newest complete checkpoint folder of a run.

    Raises:
        ValueError: if there is none.
    """
    complete = [p for p in output_dir.glob("step_*") if (p / STATE_FILE).is_file()]
    if not complete:
        raise ValueError(
            f"resume_from_checkpoint=True: output_dir={output_dir} holds no complete checkpoint; "
            "set it to False to start afresh, or name the interrupted run's output_dir."
        )
    return max(complete, key=_step_number)


def set_aside_previous_run(output_dir: Path) -> None:
    """Moves what an earlier run left in a folder to ``previous_runs/<n>``.

    Otherwise the new run, once interrupted, could resume from the old one's checkpoint.
    """
    names = ("metrics.jsonl", "completions.jsonl", "nonfinite")
    left = [
        *output_dir.glob("step_*"),
        *(output_dir / n for n in names if (output_dir / n).exists()),
    ]
    if not left:
        return
    archive = output_dir / "previous_runs"
    archive.mkdir(exist_ok=True)
    target = archive / str(1 + max((int(p.name) for p in archive.iterdir()), default=0))
    target.mkdir()
    for path in left:
        path.rename(target / path.name)
    log.info(f"Moved the previous run's files from {output_dir} to {target}.")


def load_training_state(checkpoint: Path, *, seed: int | None = None) -> dict[str, Any]:
    """Reads ``training_state.pt``.

    Raises:
        ValueError: if the run had another seed than the one given.
    """
    state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
    if seed is not None and state["seed"] != seed:
        raise ValueError(
            f"seed={seed}: {checkpoint} was made with seed {state['seed']}, which decides "
            f"the order of the prompts; set seed to {state['seed']}."
        )
    return state


def load_policy_weights(
    cfg: DictConfig, checkpoint: Path, *, output_dir: Path
) -> dict[str, Tensor]:
    """Reads the full weights that a checkpoint folder holds, in torchtune's names."""
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    checkpointer = make_checkpointer(
        cfg, output_dir=output_dir, checkpoint_dir=str(checkpoint), checkpoint_files=files
    )
    return checkpointer.load_checkpoint()[training.MODEL_KEY]


def restore_weights(
    model: nn.Module,
    training_state: Mapping[str, Any],
    checkpoint: Path,
    *,
    cfg: DictConfig,
    output_dir: Path,
) -> None:
    """Gives a freshly built policy the weights of a checkpoint folder.

    Args:
        model (nn.Module): the policy, with the base weights.
        training_state (Mapping[str, Any]): of the folder, from :func:`load_training_state`.
        checkpoint (Path): the folder.
        cfg (DictConfig): the checkpointer's config node.
        output_dir (Path): the run's folder.
    """
    weights = training_state["adapter"] or load_policy_weights(
        cfg, checkpoint, output_dir=output_dir
    )
    model.load_state_dict(weights, strict=False)


def save_checkpoint(
    *,
    checkpointer: FullModelHFCheckpointer,
    cfg: DictConfig,
    output_dir: Path,
    step: int,
    model: nn.Module,
    training_state: Mapping[str, Any],
    adapter_only: bool,
    keep_last: int | None,
) -> Path:
    """Writes ``step_<n>`` beside the others and renames it into place when it is complete.

    Every rank has to call it; the first one writes, and the others wait.

    Args:
        checkpointer (FullModelHFCheckpointer): from :func:`make_checkpointer`, after it has loaded.
        cfg (DictConfig): the checkpointer's config node.
        output_dir (Path): the run's folder.
        step (int): number of finished steps.
        model (nn.Module): the policy.
        training_state (Mapping[str, Any]): tensors and plain values; see the recipes.
        adapter_only (bool): leave out the merged weights (models with adapters only).
        keep_last (int | None): delete all but this many newest checkpoints.

    Returns:
        Path: the checkpoint folder.
    """
    state = full_state(model)
    target = output_dir / f"step_{step:06d}"
    if rank() > 0:
        barrier()
        return target
    staging = output_dir / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    folder = staging / f"epoch_{step}"  # the name that torchtune's checkpointer gives
    folder.mkdir(parents=True)
    adapter = {name: state[name].clone() for name in adapter_names(model)}
    if not (adapter and adapter_only):
        merged = merged_state(model, state) if adapter else dict(state)
        checkpointer.save_checkpoint({training.MODEL_KEY: merged}, epoch=step)
    if adapter and _fits_peft(model, cfg.model_type):
        hf_config = json.loads((Path(cfg.checkpoint_dir) / "config.json").read_text())
        tensors = peft_state(adapter, hf_config=hf_config, model_type=cfg.model_type)
        (folder / "adapter").mkdir()
        save_file(tensors, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
        settings = peft_config(model, base_model=str(cfg.checkpoint_dir))
        (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    torch.save({**training_state, "adapter": adapter}, folder / STATE_FILE)
    _publish(folder, target, keep_last=keep_last)
    barrier()
    return target


def _fits_peft(model: nn.Module, model_type: str) -> bool:
    reason = None
    if model_type in _PEFT_UNSUPPORTED:
        reason = f"{model_type} fuses the projections that PEFT adapts one by one"
    elif any(_scales_bias(module) for module in _adapter_modules(model).values()):
        reason = "torchtune's DoRA scales the bias of a layer, PEFT's does not"
    if reason is not None:
        log.warning(f"No adapter in PEFT's format ({reason}); the merged weights are complete.")
    return reason is None


def _publish(folder: Path, target: Path, *, keep_last: int | None) -> None:
    """Renames a complete folder into place, then deletes what is no longer wanted."""
    if target.exists():
        target.rename(folder.parent / "replaced")
    folder.rename(target)
    shutil.rmtree(folder.parent)
    if keep_last is not None:
        for old in sorted(target.parent.glob("step_*"), key=_step_number)[:-keep_last]:
            shutil.rmtree(old)


def _step_number(path: Path) -> int:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1


def adapter_names(model: nn.Module) -> set[str]:
    """Names of a model's adapter parameters in its state; empty without adapters."""
    return {name.replace("_checkpoint_wrapped_module.", "") for name in get_adapter_params(model)}


def _adapter_modules(model: nn.Module) -> dict[str, Any]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): module
        for name, module in model.named_modules()
        if hasattr(module, "adapter_params")
    }


def _rank_and_alpha(modules: Mapping[str, Any]) -> tuple[int, float]:
    """The rank and alpha that torchtune's builders give to all adapters of a model."""
    first = next(iter(modules.values()))
    rank = first.lora_a.weight.shape[0]
    return rank, first.scaling * rank if hasattr(first, "scaling") else first.alpha


def _scales_bias(module: Any) -> bool:
    """torchtune's DoRA multiplies a layer's bias by the magnitude too; PEFT's leaves it alone."""
    return hasattr(module, "magnitude") and getattr(module, "bias", None) is not None


def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's whole weights with its LoRA or DoRA adapters merged in.

    The adapted weights are copied first: torchtune's merge adds in place, which on a CPU would
    change the live model.
    """
    modules = _adapter_modules(model)
    state = dict(state)
    for name in modules:
        state[f"{name}.weight"] = state[f"{name}.weight"].clone()
    for name, module in modules.items():
        if _scales_bias(module):
            magnitude = state[f"{name}.magnitude"]
            weight = state[f"{name}.weight"].to(magnitude.dtype)
            lora = state[f"{name}.lora_b.weight"] @ state[f"{name}.lora_a.weight"]
            scale = magnitude / (weight + module.scaling * lora).norm(dim=1)
            state[f"{name}.bias"] = state[f"{name}.bias"] * scale
    rank, alpha = _rank_and_alpha(modules)
    return get_merged_lora_ckpt(state, rank=rank, alpha=alpha)


def peft_config(model: nn.Module, *, base_model: str) -> dict[str, Any]:
    """The ``adapter_config.json`` that PEFT needs to load a model's adapters."""
    modules = _adapter_modules(model)
    rank, alpha = _rank_and_alpha(modules)
    leaves = {_PEFT_NAMES[re.sub(r"^layers\.\d+\.", "", name)].split(".")[-1] for name in modules}
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
    adapter: Mapping[str, Tensor], *, hf_config: Mapping[str, Any], model_type: str
) -> dict[str, Tensor]:
    """Adapter parameters in PEFT's names and Hugging Face's order of rows.

    Args:
        adapter (Mapping[str, Tensor]): in torchtune's names.
        hf_config (Mapping[str, Any]): the base model's config.json.
        model_type (str): torchtune's ModelType, e.g. "LLAMA3_2".

    Returns:
        dict[str, Tensor]: what ``adapter_model.safetensors`` holds.
    """
    heads = {
        "attn.q_proj": hf_config["num_attention_heads"],
        "attn.k_proj": hf_config.get("num_key_value_heads", hf_config["num_attention_heads"]),
    }
    result = {}
    for name, value in adapter.items():
        match = re.fullmatch(r"(layers\.\d+\.)?(.+?)\.(lora_[ab]\.weight|magnitude)", name)
        assert match is not None, name
        layer, module, leaf = match.groups()
        if module in heads and leaf != "lora_a.weight" and model_type not in _UNPERMUTED:
            value = _rows_to_hf(value, num_heads=heads[module])
        prefix = f"base_model.model.model.{layer}" if layer else "base_model.model."
        result[f"{prefix}{_PEFT_NAMES[module]}.{_PEFT_LEAVES[leaf]}"] = value.contiguous()
    return result


def _rows_to_hf(value: Tensor, *, num_heads: int) -> Tensor:
    """Interleaved rotary pairs (torchtune) -> halves (Hugging Face), head by head."""
    head_dim = value.shape[0] // num_heads
    return value.view(num_heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(value.shape)
