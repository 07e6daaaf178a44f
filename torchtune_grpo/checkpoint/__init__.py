"""What is saved, so that a resumed run continues, and users can load the result elsewhere."""

from torchtune_grpo.checkpoint.checkpoints import Checkpoints, check_state
from torchtune_grpo.checkpoint.folder import (
    CheckpointError,
    all_checkpoints,
    checkpoint_folder,
    claim_output_dir,
    set_aside_previous_run,
    step_of,
    write_error,
)
from torchtune_grpo.checkpoint.resume import optimizer_state, restore_optimizer

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "all_checkpoints",
    "check_state",
    "checkpoint_folder",
    "claim_output_dir",
    "optimizer_state",
    "restore_optimizer",
    "set_aside_previous_run",
    "step_of",
    "write_error",
]
