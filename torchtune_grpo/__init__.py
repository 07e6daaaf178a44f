"""Reinforcement learning with verifiable rewards (GRPO) as a plugin for torchtune."""

# Nothing is imported here: `import torch` loads this module through the plugin hook.
__version__ = "0.1.0"
