"""Log-probs of the reference policy: adapters switched off, a frozen copy, or none at all."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torchtune import training
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params

from torchtune_grpo.config import GRPOConfig
from torchtune_grpo.logprobs import MicroBatch, trajectory_logprobs
from torchtune_grpo.parallel import DistributedConfig, shard


class AdapterReference:
    """The policy itself with its adapters switched off: no second copy of the weights."""

    def __init__(self, policy: TransformerDecoder) -> None:
        self._policy = policy

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; the arguments are those of :func:`trajectory_logprobs`."""
        with disable_adapter(self._policy):
            return trajectory_logprobs(self._policy, micro_batches, temperature=temperature)

    def shard(self, settings: DistributedConfig, *, device: torch.device) -> None:
        """Nothing to do: the policy's own weights are sharded with it."""


class FrozenReference:
    """A frozen copy of the policy as it is now, for full fine-tuning.

    Args:
        policy (TransformerDecoder): copied.
        dtype (torch.dtype): of the copy's parameters.
        device (torch.device): where the copy lives and computes.
    """

    def __init__(
        self, policy: TransformerDecoder, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = copy.deepcopy(policy).requires_grad_(False).eval().to(device)
        for parameter in self._model.parameters():  # not the buffers: RoPE's stay in float32
            parameter.data = parameter.data.to(dtype)
        self._device = device

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; the arguments are those of :func:`trajectory_logprobs`."""
        home = micro_batches[0].rows.device
        moved = [part.to(self._device) for part in micro_batches]
        return trajectory_logprobs(self._model, moved, temperature=temperature).to(home)

    def shard(self, settings: DistributedConfig, *, device: torch.device) -> None:
        """Shards the copy; see :func:`torchtune_grpo.parallel.shard`."""
        shard(self._model, settings, device=device)
        self._device = device


Reference = AdapterReference | FrozenReference


def make_reference(policy: TransformerDecoder, cfg: GRPOConfig, *, home: torch.device) -> Reference:
    """Picks the cheapest exact reference for a policy that was just loaded.

    It is the policy with adapters off if there are some, else a frozen copy, which lives on the
    device ``home`` unless ``cfg.reference`` names another.
    """
    if get_adapter_params(policy):
        return AdapterReference(policy)
    device = torch.device(cfg.reference.device or home)
    dtype = training.get_dtype(cfg.reference.dtype or cfg.dtype, device=device)
    return FrozenReference(policy, dtype=dtype, device=device)
