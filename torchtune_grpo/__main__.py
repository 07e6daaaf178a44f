"""`python -m torchtune_grpo ls|cp|cat|run|validate`: `tune`, for where the hook is turned off."""

from torchtune_grpo._plugin import register


def main() -> None:
    """Register the recipes, then hand over to torchtune's own command line."""
    register()

    from torchtune._cli.tune import main as tune

    tune()


if __name__ == "__main__":
    main()
