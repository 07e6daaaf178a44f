"""The frozen policy of the KL term."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.parallel import reshard, shard, sharded_like
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.packing import MicroBatch


class AdapterReference:
    """The policy without adapters, or with its initial ones: no second copy of the weights."""

    def __init__(self, policy: TransformerDecoder, *, keep_start: bool = False) -> None:
        self._policy = policy
        self._start = self._values() if keep_start else None

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see ``trajectory_logprobs``."""
        adapters = disable_adapter(self._policy) if self._start is None else self._as_at_start()
        with adapters:
            return trajectory_logprobs(self._policy, micro_batches, temperature=temperature)

    def shard(self, *, device: torch.device) -> None:
        if self._start is not None:
            pairs = zip(self._start, self._parameters(), strict=True)
            self._start = [sharded_like(parameter, value) for value, parameter in pairs]

    @contextmanager
    def _as_at_start(self) -> Iterator[None]:
        assert self._start is not None
        now = self._values()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    def _parameters(self) -> list[Tensor]:
        reshard(self._policy)  # the weights that a pass has gathered are not the trained ones
        return list(get_adapter_params(self._policy).values())

    def _values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters()]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value)


class FrozenReference:
    """A frozen copy of a policy whose weights are all trained."""

    def __init__(self, model: TransformerDecoder) -> None:
        self._model = model.requires_grad_(False).eval()

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see ``trajectory_logprobs``."""
        return trajectory_logprobs(self._model, micro_batches, temperature=temperature)

    def shard(self, *, device: torch.device) -> None:
        """Shard the model; see ``torchtune_grpo.machine.parallel.shard``."""
        shard(self._model, device=device)


Reference = AdapterReference | FrozenReference


def make_reference(policy: TransformerDecoder, cfg: GRPOConfig) -> Reference:
    """Pick the cheapest exact reference for a policy that was just loaded."""
    if get_adapter_params(policy):
        return AdapterReference(policy, keep_start=cfg.adapter_dir is not None)
    return FrozenReference(copy.deepcopy(policy))
