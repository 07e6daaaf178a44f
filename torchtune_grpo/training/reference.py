"""The frozen policy of the KL term."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params

from torchtune_grpo.machine import parallel
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.packing import MicroBatch


class Reference:
    """The policy, just loaded, as it stays: without its adapters, or a copy if it has none."""

    def __init__(self, policy: TransformerDecoder) -> None:
        self._model, self._is_copy = policy, not get_adapter_params(policy)
        if self._is_copy:
            self._model = copy.deepcopy(policy).requires_grad_(False).eval()

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see ``trajectory_logprobs``."""
        with disable_adapter(self._model):
            return trajectory_logprobs(self._model, micro_batches, temperature=temperature)

    def shard(self, *, device: torch.device) -> None:
        """Shard the copy, if there is one; see ``torchtune_grpo.machine.parallel.shard``."""
        if self._is_copy:
            parallel.shard(self._model, device=device)
