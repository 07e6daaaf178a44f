"""The frozen policy of the KL term."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params

from torchtune_grpo.machine.parallel import shard
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.packing import MicroBatch


class AdapterReference:
    """The policy without its adapters: no second copy of the weights."""

    def __init__(self, policy: TransformerDecoder) -> None:
        self._policy = policy

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see ``trajectory_logprobs``."""
        with disable_adapter(self._policy):
            return trajectory_logprobs(self._policy, micro_batches, temperature=temperature)

    def shard(self, *, device: torch.device) -> None:
        """Do nothing: the policy is sharded by itself."""


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


def make_reference(policy: TransformerDecoder) -> Reference:
    """Pick the cheapest exact reference for a policy that was just loaded."""
    if get_adapter_params(policy):
        return AdapterReference(policy)
    return FrozenReference(copy.deepcopy(policy))
