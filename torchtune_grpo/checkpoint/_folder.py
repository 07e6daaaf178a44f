"""What is saved, so that a resumed run continues, and users can load the result elsewhere.

A checkpoint is a folder ``step_<n>``, written atomically:

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


class Checkpoints:
    """The checkpoint folders ``step_<n>`` of a run, and the folder that it starts from.

    Args:
        cfg (DictConfig): the config's node of torchtune's checkpointer.
        output_dir (Path): the run's folder.
        adapter_only (bool): leave out the merged weights (models with adapters only).
        keep_last (int | None): delete all but this many newest checkpoints after each save.
    """

    def __init__(
        self,
        cfg: DictConfig,
        *,
        output_dir: Path,
        adapter_only: bool = False,
        keep_last: int | None = None,
    ) -> None:
        self._cfg = cfg
        self._folder = output_dir
        self._adapter_only = adapter_only
        self._keep_last = keep_last
        self._checkpointer = self._make_checkpointer()

    def _make_checkpointer(self, **overrides: Any) -> Any:
        """The config's, but writing into the staging folder."""
        staging = str(self._folder / _STAGING)
        return config.instantiate(self._cfg, output_dir=staging, **overrides)

    def base_weights(self) -> dict[str, Any]:
        """The weights to start from, in torchtune's names."""
        return self._checkpointer.load_checkpoint()[training.MODEL_KEY]

    def newest(self) -> Path:
        """The newest complete checkpoint.

        Raises:
            ValueError: if there is none.
        """
        complete = [p for p in self._folder.glob("step_*") if (p / STATE_FILE).is_file()]
        if not complete:
            raise ValueError(
                f"resume_from_checkpoint=True: output_dir={self._folder} holds no complete "
                "checkpoint; set it to False to start afresh, or name the interrupted run's "
                "output_dir."
            )
        return max(complete, key=_step_number)

    def restore(
        self, model: nn.Module, checkpoint: Path, *, seed: int | None = None
    ) -> dict[str, Any]:
        """Gives a freshly built policy the weights of a checkpoint; returns the training's state.

        Raises:
            ValueError: if the run had another seed than the one given.
        """
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        if seed is not None and state["seed"] != seed:
            raise ValueError(
                f"seed={seed}: {checkpoint} was made with seed {state['seed']}, which decides "
                f"the order of the prompts; set seed to {state['seed']}."
            )
        weights = state["adapter"]
        if not weights:
            files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
            whole = self._make_checkpointer(checkpoint_dir=str(checkpoint), checkpoint_files=files)
            weights = whole.load_checkpoint()[training.MODEL_KEY]
        model.load_state_dict(weights, strict=False)
        return state

    def save(self, model: nn.Module, training_state: Mapping[str, Any], *, step: int) -> Path:
        """Writes ``step_<n>`` beside the others and renames it into place when it is complete.

        Every rank has to call it; the first one writes, and the others wait.

        Args:
            model (nn.Module): the policy.
            training_state (Mapping[str, Any]): tensors and plain values that a run resumes from.
            step (int): number of finished steps.

        Returns:
            Path: the checkpoint folder.
        """
        state = full_state(model)
        target = self._folder / f"step_{step:06d}"
        if rank() == 0:
            staging = self._folder / _STAGING
            shutil.rmtree(staging, ignore_errors=True)
            folder = staging / f"epoch_{step}"  # the name that torchtune's checkpointer gives
            folder.mkdir(parents=True)
            adapter = {name: state[name].clone() for name in adapter_names(model)}
            if not (adapter and self._adapter_only):
                merged = merged_state(model, state) if adapter else dict(state)
                self._checkpointer.save_checkpoint({training.MODEL_KEY: merged}, epoch=step)
            if adapter and fits_peft(model, self._cfg.model_type):
                self._save_peft(model, adapter, folder / "adapter")
            torch.save({**training_state, "adapter": adapter}, folder / STATE_FILE)
            _publish(folder, target, keep_last=self._keep_last)
        barrier()
        return target

    def _save_peft(self, model: nn.Module, adapter: dict[str, Tensor], folder: Path) -> None:
        base = str(self._cfg.checkpoint_dir)
        hf_config = json.loads(Path(base, "config.json").read_text())
        tensors = peft_state(adapter, hf_config=hf_config, model_type=self._cfg.model_type)
        settings = peft_config(model, base_model=base)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def set_aside_previous_run(output_dir: Path) -> None:
    """Moves what an earlier run left in a folder to ``previous_runs/<n>``.

    Otherwise the new run, once interrupted, could resume from the old one's checkpoint.
    """
    names = ("step_*", "metrics.jsonl", "completions.jsonl", "nonfinite")
    left = [path for name in names for path in output_dir.glob(name)]
    if not left:
        return
    archive = output_dir / "previous_runs"
    archive.mkdir(exist_ok=True)
    target = archive / str(1 + max((int(p.name) for p in archive.iterdir()), default=0))
    target.mkdir()
    for path in left:
        path.rename(target / path.name)
    log.info(f"Moved the previous run's files from {output_dir} to {target}.")


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
