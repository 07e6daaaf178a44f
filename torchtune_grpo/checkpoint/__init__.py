"""Checkpoints, from which a run can be resumed, and which load elsewhere."""
