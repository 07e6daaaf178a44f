"""Of the base's folder, what a checkpoint needs to stand alone: settings, tokenizer, licence."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from torchtune_grpo.config.command_line import REPO_ID_FILE

_LARGEST = 100 * 2**20  # bytes; what is larger is weights in some format
# What is about the base's weights, or about how those were made.
_OF_THE_BASE = re.compile(
    rf"\..*|README.*|SHA256SUMS|{re.escape(REPO_ID_FILE)}|run_config\.json|adapter_.*|.*\.index\.json"
    r"|torchtune_config\.yaml|train(ing|er)_.*"
    r"|.*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)",
    re.IGNORECASE,
)
_WEIGHTS = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?")
_BELOW = ("original/tokenizer.model", "additional_chat_templates/*")  # torchtune reads the first


def keep_base_files(base: Path, folder: Path) -> None:
    """Copies what belongs beside new weights, unless it is there; deletes what else is.

    Args:
        base (Path): the base model's folder.
        folder (Path): holds new weights, and what a checkpointer has copied from the base.
    """
    files = [path for path in base.iterdir() if not _OF_THE_BASE.fullmatch(path.name)]
    files += [path for pattern in _BELOW for path in base.glob(pattern)]
    names = {path.relative_to(base) for path in files if not path.is_dir()}
    for path in sorted(folder.rglob("*"), reverse=True):  # what a folder holds comes before it
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(folder) not in names and not _WEIGHTS.fullmatch(path.name):
            path.unlink()
    for name in names:
        if not (folder / name).exists() and (base / name).stat().st_size <= _LARGEST:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(base / name, folder / name)
