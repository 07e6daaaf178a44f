"""Makes a user's own files importable by dotpath: those in the working folder, or by the config."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def extend_import_path() -> None:
    """Appends the working folder, as torchtune does, and the folder of ``--config``'s file."""
    folders = [os.getcwd()]
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""]):
        path = following if argument == "--config" else argument.removeprefix("--config=")
        if argument.startswith("--config") and Path(path).is_file():
            folders.append(str(Path(path).resolve().parent))
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)
