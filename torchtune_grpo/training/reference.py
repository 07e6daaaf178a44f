"""Log-probs of the reference policy: the policy with other adapters, or a frozen copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torchtune import training
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params

from torchtune_grpo.config.keys import DistributedConfig, GRPOConfig
from torchtune_grpo.machine.parallel import give_back, shard, sharded_like
from torchtune_grpo.training import MicroBatch, trajectory_logprobs


class AdapterReference:
    """The policy itself with other adapters, or none: no second copy of the weights.

    Args:
        policy (TransformerDecoder): with adapters.
        keep_start (bool): copy the adapters as they are now; otherwise they are switched off.
    """

    def __init__(self, policy: TransformerDecoder, *, keep_start: bool = False) -> None:
        self._policy = policy
        self._start = self._copy() if keep_start else None

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; the arguments are those of :func:`trajectory_logprobs`."""
        adapters = disable_adapter(self._policy) if self._start is None else self._as_at_start()
        with adapters:
            return trajectory_logprobs(self._policy, micro_batches, temperature=temperature)

    def shard(self, settings: DistributedConfig, *, device: torch.device) -> None:
        """Shards the copied adapters like the policy's; the other weights are the policy's own."""
        if self._start is not None:
            pairs = zip(self._start, self._parameters(), strict=True)
            self._start = [sharded_like(parameter, value) for value, parameter in pairs]

    def _parameters(self) -> list[Tensor]:
        give_back(self._policy)  # what a pass has gathered is not what is trained
        return list(get_adapter_params(self._policy).values())

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters()]

    @contextmanager
    def _as_at_start(self) -> Iterator[None]:
        assert self._start is not None
        now = self._copy()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value)


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
        """Shards the copy; see :func:`torchtune_grpo.machine.parallel.shard`."""
        shard(self._model, settings, device=device)
        self._device = device


Reference = AdapterReference | FrozenReference


def make_reference(policy: TransformerDecoder, cfg: GRPOConfig, *, home: torch.device) -> Reference:
    """Picks the cheapest exact reference for a policy that was just loaded.

    It is the policy with adapters off, or as ``cfg.adapter_dir`` has them, if there are some; else
    a frozen copy, which lives on the device ``home``.
    """
    if get_adapter_params(policy):
        keep_start = cfg.adapter_dir is not None and cfg.objective.reference == "start"
        return AdapterReference(policy, keep_start=keep_start)
    dtype = training.get_dtype(cfg.dtype, device=home)
    return FrozenReference(policy, dtype=dtype, device=home)
