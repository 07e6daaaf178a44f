"""Communication between ranks, and sharding; with a single rank all of this does nothing.

A model is either *replicated*: every rank holds all of it, and gradients are summed once a step; or
*sharded* (FSDP2): every rank holds a part of every layer, gathered while the layer is computed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import DistributedConfig
from torchtune_grpo.config.text import FirstRankFailed

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_NF4_BLOCK = 64 * 256  # numbers that share a scale of scales; FSDP2 cannot split them


def init_process_group(device: torch.device, settings: DistributedConfig) -> None:
    """Join the ranks that torchrun has started, if any; ``device`` is this rank's.

    On Linux the kernel kills a rank whose torchrun is gone, because nothing else would end it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            sys.exit("torchrun is gone")
    if "RANK" in os.environ and not _is_distributed():
        # CPU tensors (metrics, random states) go over gloo, whatever the device is.
        is_cpu = device.type == "cpu"
        backend = training.get_distributed_backend(device.type, offload_ops_to_cpu=not is_cpu)
        dist.init_process_group(backend, timeout=timedelta(minutes=settings.timeout_minutes))


def is_restarted() -> bool:
    """Whether torchrun has started these ranks again, after one failed (``--max_restarts``).

    Of several nodes, only the one whose rank failed counts it. Every rank has to call this.
    """
    return any(gather_over_ranks(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))


def may_be_restarted() -> bool:
    """Whether torchrun starts these ranks again if one fails."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


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


def on_first_rank(function: Callable[..., T], *args: object) -> T:
    """Call a function on the first rank and return its result on all.

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
    """Return every rank's value, in the order of the ranks, on every rank."""
    if world_size() == 1:  # whether or not there is a group: vLLM makes one
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(value: int) -> int:
    """Return the sum of all ranks' integers, on every rank."""
    return sum(gather_over_ranks(value))


def broadcast_trained_parameters(model: nn.Module) -> None:
    """Give every rank the first one's trained parameters: new adapters are random."""
    if world_size() > 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.broadcast(parameter.data, src=0)


def reduce_gradients(model: nn.Module) -> None:
    """Sum every rank's gradients in place; the loss's weights hold the denominator of all ranks.

    Replicated gradients are sent as one buffer; FSDP2 averaged sharded ones in the backward pass.
    """
    if world_size() == 1:
        return
    whole = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # this rank has no row to train on
            wide = parameter.grad_dtype or torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=wide)
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


def load_once(model: nn.Module, load: Callable[[], None]) -> None:
    """Call ``load`` for a model's weights, on the first rank only if others have it on meta."""
    if any(gather_over_ranks(next(model.parameters()).is_meta)):
        on_first_rank(load)
    else:
        load()


def shard(model: TransformerDecoder, *, device: torch.device) -> None:
    """Shard a model layer by layer with FSDP2; only the first rank needs to have its weights."""
    nf4 = [p for p in model.parameters() if isinstance(p, NF4Tensor)]
    if any(p.numel() // _NF4_BLOCK % world_size() for p in nf4):
        raise ValueError(
            f"distributed.sharding: {world_size()} ranks cannot share the model's 4-bit weights; "
            "set it to never, or model.quantize_base to false, or change the number of ranks."
        )
    split: Any = {
        "mesh": init_device_mesh(device.type, (world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),  # of gradients
    }
    for layer in model.layers:
        _hand_out(layer, device)
        fully_shard(layer, reshard_after_forward=True, **split)
    in_layers = {*model.layers.modules()}
    for module in model.modules():
        if module not in in_layers:
            _hand_out(module, device, recurse=False)
    if hasattr(model, "tie_weights"):  # its tied parameters have come apart on the way from meta
        model.tie_weights()
    # Embedding, norm and output end one pass and begin the next, so they stay gathered.
    fully_shard(model, reshard_after_forward=False, **split)


def _hand_out(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Move a module to every rank's device, with the first rank's values.

    FSDP2 itself would turn frozen NF4 weights into parameters that require a gradient, and fail.
    """
    if rank() == 0:
        module._apply(lambda tensor: tensor.to(device), recurse)
    else:
        module._apply(lambda tensor: _empty_like(tensor, device), recurse)
    for tensor in chain(module.parameters(recurse), module.buffers(recurse)):
        parts = tensor.__tensor_flatten__()[0] if isinstance(tensor, NF4Tensor) else ["data"]
        for part in parts:
            dist.broadcast(getattr(tensor, part), src=0)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Make an empty tensor; ``torch.empty_like`` would leave parts of NF4 weights on meta."""
    if not isinstance(tensor, NF4Tensor):
        return torch.empty_like(tensor, device=device)
    names, form = tensor.__tensor_flatten__()
    parts = {name: torch.empty_like(getattr(tensor, name), device=device) for name in names}
    form["tensor_meta"] = replace(form["tensor_meta"], device=device)
    return NF4Tensor.__tensor_unflatten__(parts, form, None, None)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Let every rank hold a whole sharded model within the block, whatever it computes there."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Free the weights that a pass through a sharded model has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
