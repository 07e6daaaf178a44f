"""What is saved, so that a resumed run continues, and users can load the result elsewhere.

A checkpoint is a folder ``step_<n>`` that appears whole or not at all:

    step_000020/
        model-*.safetensors, config.json, tokenizer ...  merged weights, as transformers loads them
        adapter/adapter_model.safetensors, adapter_config.json    LoRA or DoRA in PEFT's format
        training_state.pt                                what resuming needs
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtune import config, training, utils
from torchtune.training import FullModelHFCheckpointer

from torchtune_grpo.checkpoint._export import (
    adapter_names,
    fits_peft,
    merged_state,
    peft_config,
    peft_state,
)
from torchtune_grpo.checkpoint._whole_state import full_state
from torchtune_grpo.parallel import barrier, rank

log = utils.get_logger("INFO")

STATE_FILE = "training_state.pt"
_STAGING = ".incomplete"


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
    if adapter and fits_peft(model, cfg.model_type):
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
