"""State that a resumed run takes from its checkpoint, and keys that it takes from its config.

Tensors are saved whole, and sharded again for the ranks that resume, whose number may differ.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.dtypes.nf4tensor import NF4Tensor

from torchtune_grpo.checkpoint.folder import sha256_of
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import flat, is_secret
from torchtune_grpo.machine.parallel import rank, world_size
from torchtune_grpo.monitor.record import versions
from torchtune_grpo.training.optimizer import MASTER

# Keys without which a checkpoint's policy cannot be loaded or read
POLICY = ("model", "dtype", "tokenizer", "checkpointer.model_type")
# Keys that a resumed run must keep: the policy, where training started, and the order of prompts.
# Each name stands for all keys below it.
FIXED = (
    *(*POLICY, "checkpointer.checkpoint_files", "seed", "dataset", "sampler"),
    *("batch_size * ranks", "optimizer", "lr_scheduler._component_"),
)
# Optimizer settings that a resumed run takes from its config and not from the checkpoint
HYPERPARAMETERS: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay", "fused", "foreach")
_FREE = (*(f"optimizer.{name}" for name in HYPERPARAMETERS), "model.lora_dropout")
# Arguments of data sets that name no file, although there may be one of that name
_NO_FILES = {
    *("name", "split", "task", "columns", "prompt_column"),
    *("system_prompt", "prompt_template", "prefill"),
}
# Files in a model's folder that say what its weights and its texts mean
OF_A_MODEL = (
    *("config.json", "generation_config.json", "tokenizer*", "chat_template*", "*.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
)
HIDDEN = "... (sha256 "  # begins the digest of a secret
_FROM_CONFIG = (*HYPERPARAMETERS, "initial_lr")  # the scheduler's name for the config's lr


def run_config(cfg: GRPOConfig, *, base_files: Sequence[Path] = ()) -> dict[str, object]:
    """Return a config as plain values by dotted key; ``base_files`` hold the weights to start from.

    If a key must not change, a file is given by its name and digest, so that it may move, and so
    are the files in a folder that say what its model is.
    """
    values = cfg.model_dump()
    values["checkpointer"] = {**cfg.checkpointer, "checkpoint_files": [*map(str, base_files)]}
    values["batch_size * ranks"] = cfg.batch_size * world_size()
    values["versions"] = versions()
    if isinstance(parts := cfg.dataset.get("datasets"), Mapping):
        order = {"datasets in order": ", ".join(map(str, parts))}
        values["dataset"] = {**cfg.dataset, **order}
    result: dict[str, object] = {}
    for key, value in flat(values).items():
        if value is not None:
            result |= _identity(key, value) if _is_fixed(key, FIXED) else {key: _hidden(key, value)}
    return result


def changed_keys(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the keys that differ between two configs, with the old and the new value.

    What is no key of a config, such as the digest of a folder, is compared if both have it.
    """
    keys = sorted({*old, *new} - {"resume_from_checkpoint"})
    keys = [key for key in keys if " " not in key or {key} <= old.keys() & new.keys()]
    values = {key: (old.get(key, "null"), new.get(key, "null")) for key in keys}
    return {key: (was, now) for key, (was, now) in values.items() if was != now}


def refuse_changes(
    old: Mapping[str, object],
    new: Mapping[str, object],
    fixed: Sequence[str],
    *,
    checkpoint: Path,
    remedy: str,
) -> None:
    """Raise a ValueError with the ``fixed`` keys that differ, if any, and both values."""
    refused = [
        f"{key}={now}: {checkpoint} was made with {was}."
        for key, (was, now) in changed_keys(old, new).items()
        if _is_fixed(key, fixed)
    ]
    if refused:
        raise ValueError(f"{' '.join(refused)} Set it back, or {remedy}.")


def _is_fixed(key: str, fixed: Sequence[str]) -> bool:
    return _is_below(key, fixed) and not _is_below(key, _FREE)


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _hidden(key: str, value: Any) -> Any:
    """Return a value, or for a secret its digest, which shows whether it has changed."""
    if not is_secret(key, value):
        return value
    return f"{HIDDEN}{hashlib.sha256(value.encode()).hexdigest()[:16]})"


def _identity(key: str, value: object) -> dict[str, object]:
    """Return a path's name, with a digest if it is a file; other values go to ``_hidden``."""
    of_dataset = _is_below(key, ("dataset",))
    if not isinstance(value, str) or (of_dataset and not _NO_FILES.isdisjoint(key.split("."))):
        return {key: _hidden(key, value)}
    if of_dataset and has_magic(value):
        return {key: value, f"{key} files": _digest_of(map(Path, glob(value, recursive=True)))}
    if not os.path.exists(value):
        return {key: _hidden(key, value)}
    path = Path(value)
    if path.is_file():
        return {key: f"{path.name} (sha256 {sha256_of(path)[:16]})"}
    if of_dataset:
        return {key: path.name, f"{key} files": _digest_of(path.rglob("*"))}
    files = sorted({file for pattern in OF_A_MODEL for file in path.glob(pattern)})
    digests = {f"{key}/{file.name}": f"sha256 {sha256_of(file)[:16]}" for file in files}
    return {key: path.name, **digests}


def _digest_of(paths: Iterable[Path]) -> str:
    """Return one digest of files, in the order of their names."""
    files = sorted(path for path in paths if path.is_file())
    digests = "".join(f"{file.name} {sha256_of(file)}\n" for file in files)
    return f"{len(files)} files, sha256 {hashlib.sha256(digests.encode()).hexdigest()[:16]}"


def whole_on_first_rank(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values on the CPU, with sharded tensors made whole; {} on all ranks but the first.

    Every rank has to call it.
    """
    result: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            # A collective: in the same order on all ranks.
            value = _dequantized(value).full_tensor()
        if rank() == 0:
            result[name] = value.cpu() if isinstance(value, Tensor) else value
    return result


def _dequantized(value: DTensor) -> DTensor:
    """Dequantize shards, because NF4 weights and low-bit states cannot be gathered."""
    local = value.to_local()
    if isinstance(local, NF4Tensor):  # to bfloat16, as torchtune's hook does for whole weights
        values = local.get_original_weight().bfloat16()
    elif _is_low_bit(local):
        values = local.dequantize()
    else:
        return value
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(values, mesh, placements, shape=value.shape, stride=value.stride())


def _is_low_bit(local: Tensor) -> bool:
    return hasattr(local, "block_size")  # torchao's 8-bit, 4-bit and float8 states


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the optimizer's state with whole tensors; all ranks but the first get no tensors.

    Every rank has to call it.
    """
    state = optimizer.state_dict()
    entries = {index: whole_on_first_rank(entry) for index, entry in state["state"].items()}
    return {**state, "state": entries}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, state: Mapping[str, Any], *, steps: int
) -> None:
    """Load what ``optimizer_state`` returned on the first rank, however many ranks there were.

    The learning rate and other hyperparameters are the config's, as if they had always been: the
    fresh scheduler (or None) takes all ``steps`` that were taken before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer takes none of these steps
        for _ in range(steps if scheduler is not None else 0):
            scheduler.step()
    groups = [
        {**old, **{name: new[name] for name in _FROM_CONFIG if name in new}}
        for old, new in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {
        index: {
            name: _like_parameter(optimizer, name, value, parameters[index])
            for name, value in entry.items()
        }
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    # That cast states to the parameters' dtype (low-bit shards in name only); restore them all.
    for index, entry in entries.items():
        own: Any = optimizer.state[parameters[index]]
        tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor)}
        own.update({name: value.to(own[name].device) for name, value in tensors.items()})


def _like_parameter(
    optimizer: torch.optim.Optimizer, name: str, value: Any, parameter: Tensor
) -> object:
    """Shard a whole state tensor like its parameter, and quantize it if the optimizer does."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    value = value.to(parameter.device)
    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    if hasattr(optimizer, "_new_buffer") and name != MASTER:  # torchao's low-bit optimizers
        buffer = optimizer._new_buffer(parameter, signed=name == "exp_avg")
        if _is_low_bit(buffer.to_local()):
            buffer.to_local().copy_(value.to_local())
            return buffer
    return value
