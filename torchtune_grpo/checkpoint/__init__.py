"""What is saved, so that a resumed run continues, and users can load the result elsewhere."""

from torchtune_grpo.checkpoint._folder import Checkpoints, set_aside_previous_run
from torchtune_grpo.checkpoint._whole_state import load_optimizer_state, optimizer_state

__all__ = ["Checkpoints", "load_optimizer_state", "optimizer_state", "set_aside_previous_run"]
