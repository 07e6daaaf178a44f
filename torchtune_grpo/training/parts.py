"""What a run trains with, built once by ``torchtune_grpo.run.Run.build``."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune.modules import TransformerDecoder

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.loss import Loss
from torchtune_grpo.rollout.request import RolloutEngine
from torchtune_grpo.training.optimizer import PolicyOptimizer
from torchtune_grpo.training.reference import Reference


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The config, with what fits into the memory where it said auto, and what is made from it.

    ``reference`` is None if the loss needs none. A resumed run has ``steps_done``.
    """

    cfg: GRPOConfig
    loss: Loss
    policy: TransformerDecoder
    reference: Reference | None
    engine: RolloutEngine
    optimizer: PolicyOptimizer
    steps_done: int = 0
