"""Makes a user's own files importable by dotpath."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def extend_import_path(*folders: Path) -> None:
    """Appends the working folder, as torchtune does, and others."""
    for folder in (os.getcwd(), *map(str, folders)):
        if folder not in sys.path:
            sys.path.append(folder)
