"""Reinforcement learning with verifiable rewards (GRPO) as a plugin for torchtune."""

# Nothing is imported here: `import torch` loads this module through the plugin hook.
__version__ = "0.2.0"
TYPE_CHECKING = False  # typing's own would need an import; type checkers know the name
if TYPE_CHECKING:
    from torchtune_grpo.api import GRPO as GRPO


def __getattr__(name: str) -> object:
    if name == "GRPO":
        from torchtune_grpo.api import GRPO

        return GRPO
    if name.startswith("GRPO"):  # an ImportError reaches the user as it is
        raise ImportError(f"torchtune_grpo has no {name!r}; its trainer is GRPO (docs/python.md)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
