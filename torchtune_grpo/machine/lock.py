"""The lock of a run's folder, so that one process at a time writes there."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from torchtune_grpo.config.text import naming

_log = logging.getLogger("torchtune.utils._logging")  # torchtune's, by name
_LOCK_FILE = ".lock"
# The system frees a lock when its process ends, however it ends.
_claimed: dict[Path, tuple[IO[str], os.stat_result]] = {}


class LostFolderError(RuntimeError):
    """The run's folder was deleted, and may be another run's by now."""

    says_all = True  # no traceback is shown


def claim(folder: Path) -> None:
    """Lock a folder until this process ends; a ValueError names the process that holds the lock."""
    folder = folder.resolve()
    if is_lost(folder):  # deleted, perhaps to begin anew
        release(folder)
    if folder in _claimed:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK_FILE).open("a+")
    except OSError as error:
        raise ValueError(
            f"output_dir={folder}: cannot be written to: {error}; give another folder."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"output_dir={folder}: {file.read().strip() or 'another process'} is running in "
            "it; end that run, or give another folder."
        ) from None
    except OSError as error:
        _log.warning(f"output_dir={folder}: cannot be locked against a second run: {error}")
    file.truncate(0)
    with naming(folder / _LOCK_FILE):
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    _claimed[folder] = file, os.fstat(file.fileno())


def release(folder: Path) -> None:
    """Unlock a folder that this process may have claimed."""
    folder = folder.resolve()
    if folder in _claimed and not _is_closed(folder):
        file, _ = _claimed[folder]
        file.truncate(0)
        file.close()
    _claimed.pop(folder, None)


def held() -> list[Path]:
    """Return the folders that this process has claimed and not lost."""
    return [folder for folder in _claimed if not is_lost(folder)]


def is_lost(folder: Path) -> bool:
    """Whether a folder that this process has claimed was deleted, with its lock file."""
    folder = folder.resolve()
    if folder not in _claimed:
        return False
    with suppress(OSError):
        return not os.path.samestat(_claimed[folder][1], (folder / _LOCK_FILE).stat())
    return True


def _is_closed(folder: Path) -> bool:
    """Whether other code in this process has closed the lock file of a folder that is claimed."""
    file, claimed = _claimed[folder]
    with suppress(OSError):
        return not os.path.samestat(claimed, os.fstat(file.fileno()))
    return True


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise a LostFolderError, before the block or instead of its error, if the folder is lost."""
    _check(folder)
    try:
        yield
    except Exception:
        _check(folder)
        raise


def _check(folder: Path) -> None:
    if is_lost(folder):
        raise LostFolderError(
            f"output_dir={folder}: was deleted while this run was going on, and may be another "
            "run's by now; nothing more is written there."
        )
    folder = folder.resolve()
    if folder in _claimed and _is_closed(folder):
        raise LostFolderError(
            f"output_dir={folder}: other code has closed this process's files, and so its lock. If "
            "a reward did, give it isolation: process."
        )
