"""A teacher: a frozen model that says how likely each sampled token would have been to it.

It samples nothing itself: each token that the policy has sampled gets an advantage, see
``Teacher.advantages``.

Source: Lu et al. 2025, "On-Policy Distillation" (Thinking Machines).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.training.packing import MicroBatch
from torchtune_grpo.training.reference import FrozenReference
from torchtune_grpo.trajectory import Trajectory


class Teacher:
    """Another model with the policy's tokens, which judges them beside the rewards.

    Args:
        model_dir (str): the model's folder, in the hub's format
        coeff (float): weight of its log-prob of a token less the policy's, in the advantage
        alone (bool): leave out the advantages that come from rewards
    """

    model: FrozenReference | None = None  # set when the policy has been built

    def __init__(self, model_dir: str, coeff: float = 1.0, alone: bool = False) -> None:
        if not coeff > 0:
            raise ValueError(f"coeff={coeff}: give a number above 0.")
        self.model_dir, self.coeff, self.alone = model_dir, coeff, alone

    def config(self, cfg: GRPOConfig) -> GRPOConfig:
        """Return the config of a run whose policy is the teacher's model."""
        folders = {"checkpoint_dir": self.model_dir, "output_dir": cfg.output_dir}
        return cfg.replace(
            model_dir=self.model_dir,
            adapter_dir=None,
            model={"_component_": "torchtune_grpo.models.hf_model", "model_dir": self.model_dir},
            checkpointer={"_component_": "torchtune_grpo.models.HFCheckpointer", **folders},
        )

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> Tensor:
        """Log-probs [N, L]; see ``trajectory_logprobs``."""
        assert self.model is not None
        return self.model.logprobs(micro_batches, temperature=temperature)

    def shard(self, *, device: torch.device) -> None:
        """Shard the model; see ``torchtune_grpo.machine.parallel.shard``."""
        assert self.model is not None
        self.model.shard(device=device)

    def advantages(self, rows: Trajectory, old_logprobs: Tensor) -> Tensor:
        """Return the advantages [n, L] of the tokens of n rows.

            A + coeff * (teacher - old)     with old_logprobs [n, L], of the policy that sampled

        Over the policy's choices of a token, the mean of ``old - teacher`` is KL(policy || teacher)
        there, and the surrogate's gradient is that of A and of this KL.
        """
        assert rows.advantages is not None and rows.teacher_logprobs is not None
        gap = rows.teacher_logprobs - old_logprobs.detach()
        judged = self.coeff * gap.where(rows.response_mask, 0)
        return judged if self.alone else rows.advantages[:, None] + judged
