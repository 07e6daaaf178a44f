"""Weights and optimizer states as whole tensors, the form of a checkpoint for any number of ranks.

Sharded tensors are put together on the first rank, and cut again for the ranks of a resumed run.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor

from torchtune_grpo.checkpoint.run_config import HYPERPARAMETERS
from torchtune_grpo.machine.parallel import rank, sharded_like
from torchtune_grpo.training.optimizer import MASTER, has_masters

_OF_CONFIG = (*HYPERPARAMETERS, "initial_lr")  # the scheduler's name for the config's lr


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's whole weights on the CPU, in torchtune's names; empty on all ranks but the first.

    Every rank has to call it.
    """
    return _full_on_first_rank(model.state_dict())


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with whole tensors: the same from one rank or many, sharded or not.

    Every rank has to call it; all but the first get no tensors.
    """
    state = optimizer.state_dict()
    entries = {index: _full_on_first_rank(entry) for index, entry in state["state"].items()}
    return {**state, "state": entries}


def later_bytes(optimizer: torch.optim.Optimizer) -> int:
    """About what its state takes once it has made a step; the tensors are whole ones."""
    numbers = len(optimizer.defaults.get("betas", ())) or bool(optimizer.defaults.get("momentum"))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if has_masters(optimizer):
        return sum((numbers + 1) * p.numel() * torch.float32.itemsize for p in parameters)
    return sum(numbers * p.numel() * p.itemsize for p in parameters)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, state: Mapping[str, Any], *, steps: int
) -> None:
    """Loads what :func:`optimizer_state` gave the first rank, however many ranks there were.

    Learning rate and other hyperparameters stay those of the config, as if they had always been.

    Args:
        optimizer (torch.optim.Optimizer): freshly made from the config.
        scheduler (Any): the learning rate's, freshly made; or None.
        state (Mapping[str, Any]): of the optimizer.
        steps (int): that the scheduler has taken.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that the optimizer takes none of these steps
        for _ in range(steps if scheduler is not None else 0):
            scheduler.step()
    groups = [
        {**old, **{name: new[name] for name in _OF_CONFIG if name in new}}
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
    # That casts to the parameters' dtype, low-bit shards in name only; put all back as they were.
    for index, entry in entries.items():
        own: Any = optimizer.state[parameters[index]]
        tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor)}
        own.update({name: value.to(own[name].device) for name, value in tensors.items()})


def _like_parameter(
    optimizer: torch.optim.Optimizer, name: str, value: Any, parameter: Tensor
) -> Any:
    """Shards a whole state tensor like its parameter, and quantizes it if the optimizer does."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    value = sharded_like(parameter, value)
    if hasattr(optimizer, "_new_buffer") and name != MASTER:  # torchao's low-bit optimizers
        buffer = optimizer._new_buffer(parameter, signed=name == "exp_avg")
        if _is_low_bit(buffer):
            buffer.to_local().copy_(value.to_local())
            return buffer
    return value


def _full_on_first_rank(values: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            value = _plain(value).full_tensor()  # a collective: in the same order on all ranks
        if rank() == 0:
            result[name] = value.cpu() if isinstance(value, Tensor) else value
    return result


def _is_low_bit(value: Any) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return hasattr(local, "block_size")  # torchao's 8-bit, 4-bit and float8 states


def _plain(value: DTensor) -> DTensor:
    """Shards of NF4 weights and low-bit optimizer states cannot be put together; values can."""
    local = value.to_local()
    if isinstance(local, NF4Tensor):  # in bfloat16, as torchtune's hook gives whole NF4 weights
        values = local.get_original_weight().bfloat16()
    elif _is_low_bit(value):
        values = local.dequantize()
    else:
        return value
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(values, mesh, placements, shape=value.shape, stride=value.stride())
