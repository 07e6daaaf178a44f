"""What the recipes need from several ranks. In a world of one, nothing here does anything.

Two ways to spread a model: *replicated*, every rank holds it whole and gradients are summed once a
step; and *sharded* (FSDP2), every rank holds a part of every layer, gathered while it is computed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import DistributedConfig
from torchtune_grpo.config.text import FirstRankFailed

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_NF4_BLOCK = 64 * 256  # numbers that share a scale of scales; FSDP2 does not cut through it


def init_process_group(device: torch.device) -> None:
    """Join the ranks that torchrun has started, if it has; ``device`` is this rank's.

    The kernel kills a rank whose torchrun is gone (Linux): nothing else would end it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            sys.exit("torchrun is gone")
    if "RANK" in os.environ and not _is_distributed():
        # CPU tensors (metrics, random states) go over gloo, whatever the device is.
        own = training.get_distributed_backend(device.type)
        dist.init_process_group("gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}")


def end_process_group() -> None:
    """Leave the other ranks, if there are any."""
    if _is_distributed():
        dist.destroy_process_group()


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if _is_distributed() else 1


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if _is_distributed() else 0


def on_first_rank(function: Callable[..., T], *args: Any) -> T:
    """Call a function on the first rank, while the others wait; all get its result.

    If it raises, the other ranks raise a FirstRankFailed.
    """
    result: Any = None
    failed: Exception | None = None
    if rank() == 0:
        try:
            result = function(*args)
        except Exception as error:
            failed = error
    result, message = gather_over_ranks((result, failed and str(failed)))[0]
    if message is not None:
        raise failed or FirstRankFailed(f"The first rank failed: {message}")
    return result


def gather_over_ranks(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on every rank."""
    if not _is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(value: int) -> int:
    """The sum of every rank's integer."""
    return sum(gather_over_ranks(value))


def broadcast_trained_parameters(model: nn.Module) -> None:
    """Give every rank the first one's trained parameters: fresh adapters are random."""
    if _is_distributed():
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.broadcast(parameter.data, src=0)


def reduce_gradients(model: nn.Module) -> None:
    """Sum every rank's gradients, in place.

    The loss's weights carry the denominator of the whole step over all ranks, so gradients add up.
    Replicated ones are sent as one buffer. Sharded ones were averaged by FSDP2 in the backward pass
    and only need the factor.
    """
    if not _is_distributed():
        return
    whole = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # a rank without a row that is trained on
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter.grad, DTensor):
            parameter.grad.mul_(world_size())
        else:
            whole.append(parameter.grad)
    if whole:
        buffer = torch.cat([grad.flatten() for grad in whole])
        dist.all_reduce(buffer)
        sizes = [grad.numel() for grad in whole]
        for grad, part in zip(whole, buffer.split(sizes), strict=True):
            grad.copy_(part.view_as(grad))


def shard(model: TransformerDecoder, settings: DistributedConfig, *, device: torch.device) -> None:
    """Shard a model, whole and with the same weights on every rank, layer by layer with FSDP2."""
    if settings.cpu_offload and device.type == "cpu":
        raise ValueError("distributed.cpu_offload=True: works with device=cuda; set it to false.")
    nf4 = [p for p in model.parameters() if isinstance(p, NF4Tensor)]
    if any(p.numel() // _NF4_BLOCK % world_size() for p in nf4):
        raise ValueError(
            f"distributed.sharding: {world_size()} ranks cannot share the model's weights in 4 "
            "bits; set it to never, or model.quantize_base to false, or take another number of "
            "ranks."
        )
    mesh = init_device_mesh(device.type, (world_size(),))
    policy = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy, reshard_after_forward=True)
    # Embedding, norm and output stay gathered from the forward to the backward pass, which both
    # begin or end with them.
    fully_shard(model, mesh=mesh, offload_policy=policy, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Free what a pass through a sharded model has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, the same on all ranks, sharded if the parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements)


def random_states(device: torch.device) -> list[dict[str, Tensor]]:
    """Every rank's states of torch's generators, of the CPU and of its device, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return gather_over_ranks(states)


def restore_random_state(states: Sequence[dict[str, Tensor]], device: torch.device) -> None:
    """Set this rank's of :func:`random_states`; a generator that was not there keeps its own."""
    own = states[rank()] if rank() < len(states) else {}
    if "cpu" in own:
        torch.set_rng_state(own["cpu"])
    if device.type != "cpu" and device.type in own:
        torch.get_device_module(device).set_rng_state(own[device.type], device)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
