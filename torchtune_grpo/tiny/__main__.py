"""``python -m torchtune_grpo.tiny OUTPUT_DIR [--seed N]`` makes the tiny checkpoint."""

import argparse
from pathlib import Path

from torchtune_grpo.tiny import make_tiny_checkpoint


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m torchtune_grpo.tiny", description=__doc__)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup-steps", type=int, default=3000)
    arguments = parser.parse_args()
    make_tiny_checkpoint(
        arguments.output_dir, seed=arguments.seed, warmup_steps=arguments.warmup_steps
    )


if __name__ == "__main__":
    main()
