"""A run's folder: its checkpoints ``step_<n>``, and what an earlier run left there.

A checkpoint is written in ``.incomplete``, gets a file with the SHA-256 of each of its files, and
is renamed once the disk holds all of them. Before it is deleted it is renamed again. A process that
is killed therefore leaves whole checkpoints and hidden folders, which the next run clears.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtune import utils

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine import lock
from torchtune_grpo.monitor.record import COMPLETIONS_FILE, RUN_FILE

log = utils.get_logger("INFO")

BEST = "best"  # a link to a checkpoint
SUMS_FILE = "SHA256SUMS"  # in sha256sum's format, plus a last line with its own sum
STAGING = ".incomplete"
BEGUN = ".begun"  # there while checkpoints are of torchrun's present job; see mark_begun
_DELETED = ".deleted_"  # prefix of a folder that is being deleted
_ERROR_FILE = "error.txt"  # the last run's traceback, if it failed


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or all existing ones are damaged."""

    says_all = True  # no traceback is shown


def claim_output_dir(folder: Path) -> None:
    """Lock a folder until this process ends, and clear what a killed run left unfinished there."""
    lock.claim(folder)
    (folder / _ERROR_FILE).unlink(missing_ok=True)
    for left in (*folder.glob(STAGING), *folder.glob(f"{_DELETED}*")):
        shutil.rmtree(left, ignore_errors=True)


def mark_begun(folder: Path, *, begun: bool) -> None:
    """Note whether a job's run has begun in a folder.

    Ranks that torchrun starts again then know whose checkpoints are there.
    """
    if begun:
        (folder / BEGUN).touch()
    else:
        (folder / BEGUN).unlink(missing_ok=True)


def write_error(text: str) -> str | None:
    """Write a traceback into the folder this process has claimed, if any; return its path."""
    for folder in lock.held():
        with suppress(OSError):  # the error may be a full disk
            (folder / _ERROR_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
            return str(folder / _ERROR_FILE)
    return None


def set_aside_previous_run(cfg: GRPOConfig) -> None:
    """Move what an earlier run left in ``output_dir`` to ``previous_runs/<n>`` there.

    Otherwise the new run, once interrupted, could resume from the old one's checkpoint. Logs and
    profiles are moved, too, if they have a folder of their own in ``output_dir``.
    """
    output_dir = Path(os.path.abspath(cfg.output_dir))
    names = (BEST, RUN_FILE, COMPLETIONS_FILE)
    left = [*all_checkpoints(output_dir), *(output_dir / name for name in names)]
    if not any(map(os.path.lexists, left)):
        return
    left += [output_dir / "torchtune_config.yaml", output_dir / "run.html"]
    logger, profiler = cfg.metric_logger, cfg.profiler or {}
    for folder in (logger.get("log_dir"), logger.get("dir"), profiler.get("output_dir")):
        path = Path(os.path.abspath(folder or output_dir))
        if output_dir in path.parents:
            left.append(path)
    archive = output_dir / "previous_runs"
    archive.mkdir(exist_ok=True)
    runs = [int(path.name) for path in archive.iterdir() if path.name.isdecimal()]
    target = archive / str(1 + max(runs, default=0))
    target.mkdir()
    for path in filter(os.path.lexists, left):  # a folder may lie in one that has moved already
        new = target / path.relative_to(output_dir)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
    log.info(f"Moved the previous run's files from {output_dir} to {target}.")


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the number of finished steps in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def all_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints, whole or damaged, oldest first, and no other folders."""
    folders = [path for path in output_dir.glob("step_*") if path.name[5:].isdecimal()]
    named = [path for path in folders if path == checkpoint_folder(output_dir, step_of(path))]
    return sorted(named, key=step_of)


def newest_checkpoint(output_dir: Path) -> Path:
    """Return the newest undamaged checkpoint, and warn about newer ones that are damaged.

    Raises a ValueError if there is no checkpoint, and a CheckpointError if all are damaged.
    """
    folders = all_checkpoints(output_dir)
    if not folders:
        raise ValueError(
            f"resume_from_checkpoint=True: output_dir={output_dir} holds no complete checkpoint; "
            "set it to False to start afresh, or name the interrupted run's output_dir."
        )
    for folder in reversed(folders):
        damage = find_damage(folder)
        if damage is None:
            return folder
        log.warning(f"{folder} cannot be used: {damage}.")
    raise CheckpointError(
        f"output_dir={output_dir}: all of its checkpoints are damaged. Restore one, or start "
        "afresh with resume_from_checkpoint=False."
    )


def link_best(output_dir: Path, step: int | None) -> None:
    """Point the link ``best`` to a step's checkpoint once that exists; None removes the link."""
    link = output_dir / BEST
    if step is None:
        link.unlink(missing_ok=True)
    elif (target := checkpoint_folder(output_dir, step)).is_dir():
        beside = link.with_name(f"{BEST}.new")
        beside.unlink(missing_ok=True)
        try:
            beside.symlink_to(target.name)
            beside.replace(link)
        except OSError as error:
            log.warning(f"{link}: could not link it to {target.name}, the best: {error}.")


@contextmanager
def staging(output_dir: Path, *, failing: str, remedy: str) -> Iterator[Path]:
    """Provide an empty folder for a checkpoint; whatever the block leaves there is deleted.

    An exception in the block becomes a CheckpointError: ``failing``, the cause, ``remedy``.
    """
    folder = output_dir / STAGING
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield folder
    except Exception as error:
        # torch.save raises an error of its own while it handles the file's error.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(f"{failing} could not be written: {cause}. {remedy}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, target: Path) -> None:
    """Add the checksums to a folder, and rename it into place once the disk holds it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = "".join(f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files)
    own = hashlib.sha256(lines.encode()).hexdigest()
    (folder / SUMS_FILE).write_text(f"{lines}# {own}\n", encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    if target.exists():
        delete(target)
    folder.rename(target)
    _sync(target.parent)


def find_damage(folder: Path) -> str | None:
    """Name the first file that differs from what ``publish`` saw; None if there is none."""
    try:
        lines, _, own = (folder / SUMS_FILE).read_bytes().rpartition(b"# ")
        if own.strip() != hashlib.sha256(lines).hexdigest().encode():
            return f"{SUMS_FILE} is damaged"
        for line in lines.decode().splitlines():
            expected, _, name = line.partition("  ")
            if sha256_of(folder / name) != expected:
                return f"{name} is damaged"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete(folder: Path) -> None:
    """Delete a folder; a kill in the middle leaves nothing under its name."""
    hidden = folder.with_name(f"{_DELETED}{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    """Wait until the disk holds a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
