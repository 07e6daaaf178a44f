"""What is saved, so that a resumed run continues, and users can load the result elsewhere."""

from torchtune_grpo.checkpoint._folder import (
    find_checkpoint,
    load_training_state,
    make_checkpointer,
    restore_weights,
    save_checkpoint,
    set_aside_previous_run,
)
from torchtune_grpo.checkpoint._whole_state import load_optimizer_state, optimizer_state

__all__ = [
    "find_checkpoint",
    "load_optimizer_state",
    "load_training_state",
    "make_checkpointer",
    "optimizer_state",
    "restore_weights",
    "save_checkpoint",
    "set_aside_previous_run",
]
