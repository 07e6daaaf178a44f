"""The function that `import torch` calls, by the entry point in setup.cfg.

Even `pip install --editable` copies this file into site-packages, so that `import torch` works on
when the clone has been moved or deleted.
"""


def autoload() -> None:
    """Make `tune` know our recipes, if the package is still there."""
    try:
        from torchtune_grpo.cli import tune
    except Exception:
        return
    tune.autoload()
