"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from torchtune import utils

log = utils.get_logger("INFO")

LOCK_FILE = ".lock"
ERROR_FILE = "error.txt"  # the last run's traceback, if it failed
STAGING = ".incomplete"  # what is being written
DELETED = ".deleted_"  # begins the name of what is being deleted
_claimed: dict[Path, IO[str]] = {}  # the system frees a lock when its process ends, however it does


def claim_output_dir(folder: Path) -> None:
    """Makes a folder this process's until it ends, and clears what a killed run left half done.

    Raises:
        ValueError: if another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    if folder not in _claimed:
        file = (folder / LOCK_FILE).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"output_dir={folder}: {file.read().strip() or 'another process'} is running in "
                "it; end that run, or give another folder."
            ) from None
        except OSError as error:
            log.warning(f"output_dir={folder}: a second run in it would go unseen: {error}")
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        _claimed[folder] = file
    (folder / ERROR_FILE).unlink(missing_ok=True)
    for left in (*folder.glob(STAGING), *folder.glob(f"{DELETED}*")):
        shutil.rmtree(left, ignore_errors=True)


def release_output_dir(folder: Path) -> None:
    """Lets other processes have a folder again; one that this process does not have stays so."""
    file = _claimed.pop(folder.resolve(), None)
    if file is not None:
        file.truncate(0)
        file.close()


def delete(folder: Path) -> None:
    """Deletes a folder; killed meanwhile, it leaves none of that name, nor half of one."""
    hidden = folder.with_name(f"{DELETED}{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def write_error(text: str) -> str | None:
    """Writes a traceback into the folder that this process has, if any; returns the file's path."""
    for folder in _claimed:
        with suppress(OSError):  # the error may be a full disk
            (folder / ERROR_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
            return str(folder / ERROR_FILE)
    return None
