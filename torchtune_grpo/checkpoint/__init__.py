"""What is saved, so that a resumed run continues, and users can load the result elsewhere."""

from torchtune_grpo.checkpoint.claim import claim_output_dir, release_output_dir, write_error
from torchtune_grpo.checkpoint.folder import (
    RUN_CONFIG_FILE,
    CheckpointError,
    Checkpoints,
    set_aside_previous_run,
)
from torchtune_grpo.checkpoint.whole_state import optimizer_state, restore_optimizer

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "RUN_CONFIG_FILE",
    "claim_output_dir",
    "optimizer_state",
    "release_output_dir",
    "restore_optimizer",
    "set_aside_previous_run",
    "write_error",
]
