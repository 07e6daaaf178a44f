"""The config that a checkpoint was written under, and what of it a resumed run may change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from torchtune_grpo.checkpoint.checksums import describe_file, sha256_of
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.parallel import world_size
from torchtune_grpo.models import adapter_files

# Key -> why it must stay; it stands for all keys below it. Everything else may change.
FIXED = {
    "model": "it says what the weights compute",
    "dtype": "the weights are of it",
    "tokenizer": "the policy learned its tokens",
    "checkpointer.model_type": "it says how the weights are stored",
    "checkpointer.checkpoint_files": "training started from them",
    "adapter_dir": "training started from it",
    "seed": "it decides the order of the prompts",
    "dataset": "it decides which prompts come next",
    "sampler": "it decides which prompts come next",
    "batch_size * ranks": "it decides which prompts come next",
    "optimizer": "the saved states are those of another one",
    "lr_scheduler._component_": "the learning rate would jump",
}
# Of these, what a checkpoint's policy cannot be loaded or read without.
POLICY = ("model", "dtype", "tokenizer", "checkpointer.model_type")
# Of a resumed run, these are the config's, not the checkpoint's.
HYPERPARAMETERS: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay", "fused", "foreach")
_FREE = (*(f"optimizer.{name}" for name in HYPERPARAMETERS), "model.lora_dropout")
# In the environment: the base weights are read and compared whole, at the start and at a resume.
FULL_DIGEST, _SHA256 = "TORCHTUNE_GRPO_FULL_DIGEST", ".sha256"
_COMPONENT = "._component_"


def run_config(cfg: GRPOConfig, *, base_files: Sequence[Path]) -> dict[str, Any]:
    """A config as plain values by dotted key.

    Where a key must stay, a file is described by its name and contents, so that it may move.

    Args:
        cfg (GRPOConfig): the config.
        base_files (Sequence[Path]): the weights that training starts from.
    """
    flat = {key: value for key, value in _flat(cfg.model_dump()) if value is not None}
    for key in [key for key in flat if key.startswith("checkpointer.checkpoint_files")]:
        del flat[key]
    for number, path in enumerate(base_files):
        flat[f"checkpointer.checkpoint_files.{number}"] = str(path)
        if os.environ.get(FULL_DIGEST):
            flat[f"checkpointer.checkpoint_files.{number}{_SHA256}"] = sha256_of(path)
    if (folder := flat.pop("adapter_dir", None)) is not None:
        for number, path in enumerate(adapter_files(folder)):
            flat[f"adapter_dir.{number}"] = str(path)
    flat["batch_size * ranks"] = cfg.batch_size * world_size()
    return {key: _described(value) if _why_fixed(key) else value for key, value in flat.items()}


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], *, checkpoint: Path) -> list[str]:
    """What differs between a checkpoint's config and the one to resume it under.

    Returns:
        list[str]: such as "optimizer.lr 0.0003 -> 0.0001".

    Raises:
        ValueError: if a key differs that must not.
    """
    refuse_changes(
        old,
        new,
        checkpoint=checkpoint,
        remedy="start afresh with resume_from_checkpoint=False",
    )
    return [
        f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in _differing(old, new)
        if key != "resume_from_checkpoint"
    ]


def refuse_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    checkpoint: Path,
    remedy: str,
    below: Iterable[str] = FIXED,
) -> None:
    """Raises a ValueError if a key differs that must not; of FIXED, only those ``below`` count."""
    keys = _differing(old, new)
    nodes = [key.removesuffix(_COMPONENT) for key in keys if key.endswith(_COMPONENT)]
    refused = [
        f"{key}={_shown(new.get(key))}: {checkpoint} was made with {_shown(old.get(key))}, and "
        f"{why}."
        for key in keys
        if any(_is_below(key, name) for name in below) and (why := _why_fixed(key))
        # another component takes other arguments
        if key.endswith(_COMPONENT) or not any(_is_below(key, node) for node in nodes)
    ]
    if refused:
        raise ValueError(f"{' '.join(refused)} Set it back, or {remedy}.")


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return [key for key in keys if not key.endswith(_SHA256) or (key in old and key in new)]


def _why_fixed(key: str) -> str | None:
    if any(_is_below(key, name) for name in _FREE):
        return None
    return next((why for name, why in FIXED.items() if _is_below(key, name)), None)


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below a node that is no node itself, by its dotted key; an empty node is one."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value)) or []
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))


def _described(value: Any) -> Any:
    if isinstance(value, str) and os.path.exists(value):
        return describe_file(Path(value)) if os.path.isfile(value) else Path(value).name
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
