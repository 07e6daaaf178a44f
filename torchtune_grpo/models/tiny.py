"""The tiny model: a Llama of 0.3M parameters that comes with the package, in ``tiny_llama/``.

``tests/tiny_llama.py`` trained it on short sums with their answers. In its tokenizer each digit is
a token of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

SHIPPED = Path(__file__).resolve().parents[1] / "tiny_llama"


def prepare(checkpoint_dir: str | Path) -> None:
    """Copy the model's folder unless it exists; several processes may call this at once."""

    def copy(folder: Path) -> None:
        for file in SHIPPED.iterdir():
            shutil.copyfile(file, folder / file.name)

    make_once(checkpoint_dir, copy)


def make_once(target: str | Path, fill: Callable[[Path], None]) -> None:
    """Make a folder unless it holds something; several processes may call this at once.

    ``fill`` fills it under another path, beside which it may put temporary files; then the folder
    is moved into place in one step.
    """
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if target.exists() and any(target.iterdir()):
            return
        work = target.parent / f".{target.name}.part"
        shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
        try:
            folder = work / target.name
            folder.mkdir(parents=True)
            fill(folder)
            folder.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
