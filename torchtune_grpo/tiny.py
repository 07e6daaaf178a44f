"""The tiny model: a Llama of 0.3M parameters that comes with the package, in ``tiny_llama/``.

It was taught short sums with their answers, by ``tests/tiny_llama.py``. In its tokenizer each digit
is a token of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

_SHIPPED = Path(__file__).with_name("tiny_llama")


def prepare(checkpoint_dir: str | Path) -> None:
    """Copy the model's folder unless it exists; several processes may call this at once."""

    def copy(folder: Path) -> None:
        for file in _SHIPPED.iterdir():
            shutil.copyfile(file, folder / file.name)

    make_once(checkpoint_dir, copy)


def make_once(target: str | Path, fill: Callable[[Path], None]) -> None:
    """Make a folder unless it holds something; several processes may call this at once.

    It appears in one move when ``fill`` has filled it under another path, beside which there is
    room for what is only needed until then.
    """
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if target.exists() and any(target.iterdir()):
            return
        work = target.parent / f".{target.name}.part"
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
        try:
            folder = work / target.name
            folder.mkdir(parents=True)
            fill(folder)
            folder.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
