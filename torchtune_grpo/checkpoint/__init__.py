"""What is saved, so that a resumed run continues, and users can load the result elsewhere."""

from torchtune_grpo.checkpoint._claim import claim_output_dir, write_error
from torchtune_grpo.checkpoint._folder import CheckpointError, Checkpoints, set_aside_previous_run
from torchtune_grpo.checkpoint._whole_state import optimizer_state, restore_optimizer

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "claim_output_dir",
    "optimizer_state",
    "restore_optimizer",
    "set_aside_previous_run",
    "write_error",
]
