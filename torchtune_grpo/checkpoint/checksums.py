"""Whether a checkpoint's files are as they were written, by sums in a file beside them.

``sha256sum --check SHA256SUMS`` in the folder tells the same.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUMS_FILE = "SHA256SUMS"
_BLOCK = 2**20  # bytes


def write_sums(folder: Path) -> None:
    """Writes the sums of all files in a folder; the disk holds everything when it returns."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = "".join(f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files)
    own = hashlib.sha256(lines.encode()).hexdigest()
    (folder / SUMS_FILE).write_text(f"{lines}# {own}\n", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Waits until the disk holds a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_damage(folder: Path) -> str | None:
    """What differs from what :func:`write_sums` saw, in a few words; None if nothing does."""
    try:
        lines = (folder / SUMS_FILE).read_bytes()
        body, _, own = lines.rpartition(b"# ")
        if own.strip() != hashlib.sha256(body).hexdigest().encode():
            return f"{SUMS_FILE} is damaged"
        for line in body.decode().splitlines():
            expected, _, name = line.partition("  ")
            if sha256_of(folder / name) != expected:
                return f"{name} is damaged"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    return None


def describe_file(path: Path) -> str:
    """A file's name, bytes, and the digest of its beginning, middle and end: one MiB of each."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for start in (0, size // 2, max(size - _BLOCK, 0)):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return f"{path.name} ({size} bytes, {digest.hexdigest()[:16]})"


def sha256_of(path: Path) -> str:
    """The digest of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
