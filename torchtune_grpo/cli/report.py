"""``torchtune-grpo report OUTPUT_DIR [OUTPUT_DIR ...]``."""

import argparse
from pathlib import Path

from torchtune_grpo.monitor.report import write_comparison, write_page


def main() -> None:
    """Write a page of one run, or one that compares several, and print its headline and path."""
    parser = argparse.ArgumentParser(
        prog="torchtune-grpo report", description="Writes a run as one HTML page."
    )
    parser.add_argument("folder", type=Path, nargs="+", help="a run's output_dir; several: compare")
    parser.add_argument(
        "--output", type=Path, help="default: FOLDER/run.html; of several, comparison.html here"
    )
    args = parser.parse_args()
    try:
        if len(args.folder) == 1:
            path = args.output or args.folder[0] / "run.html"
            headline = write_page(args.folder[0], path)
        else:
            path = args.output or Path("comparison.html")
            headline = write_comparison(args.folder, path)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{headline}\n{path}")
