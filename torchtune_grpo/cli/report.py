"""``torchtune-grpo report OUTPUT_DIR [OUTPUT_DIR ...]``."""

import argparse
from pathlib import Path

from torchtune_grpo.monitor.report.page import comparison_page, run_page, write


def main() -> None:
    """Writes a page of one run, or one that compares several, and prints its headline and path."""
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
            page, path = run_page(args.folder[0]), args.folder[0] / "run.html"
        else:
            page, path = comparison_page(args.folder), Path("comparison.html")
        write(args.output or path, page)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{page.headline}\n{args.output or path}")
