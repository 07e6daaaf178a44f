"""A run as one page that can be mailed: ``torchtune-grpo report OUTPUT_DIR``."""

from pathlib import Path


def write_page(folder: Path) -> Path:
    """Writes ``run.html`` into a run's folder, whole or not at all; the old one stays till then.

    Args:
        folder (Path): the run's ``output_dir``; what it does not hold yet is left out.

    Returns:
        Path: of the page.

    Raises:
        ValueError: if the folder is missing or holds no run.
        OSError: if the page cannot be written.
    """
    # The plotting library takes half a second to import, which a run spends on its first page only.
    from torchtune_grpo.monitor.report.page import run_page, write

    return write(folder / "run.html", run_page(folder))


__all__ = ["write_page"]
