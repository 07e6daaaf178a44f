"""The tiny model: a Llama of 0.3M parameters that comes with the package, in ``tiny_llama/``.

It was taught short sums with their answers, by ``tests/tiny_llama.py``. In its tokenizer each digit
is a token of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

_SHIPPED = Path(__file__).with_name("tiny_llama")


def prepare(checkpoint_dir: str | Path) -> None:
    """Copy the model's folder unless it exists; several processes may call this at once."""
    target = Path(checkpoint_dir).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if target.exists():
            return
        with new_folder(target) as folder:
            for file in _SHIPPED.iterdir():
                shutil.copyfile(file, folder / file.name)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes ``target``, in one move, when the block has filled it."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name) / target.name
        folder.mkdir()
        yield folder
        folder.rename(target)
