"""A checkpoint on the Hugging Face hub: the model and its card, and nothing else of the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from torchtune import utils

from torchtune_grpo.checkpoint import folder as files
from torchtune_grpo.checkpoint.model_card import CARD_FILE, ModelCard
from torchtune_grpo.checkpoint.resume import OF_A_MODEL
from torchtune_grpo.config.text import describe

log = utils.get_logger("INFO")

_FILES = (
    *(*OF_A_MODEL, "README.md", "model*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model*.bin*", "adapter/adapter_*", "original/tokenizer.model"),
    *("additional_chat_templates/*", "[Ll][Ii][Cc][Ee][Nn][Ss][Ee]*", "NOTICE*", "USE_POLICY*"),
)


def push(run: Path, name: str, *, checkpoint: str | None = None, private: bool = True) -> str:
    """Upload a checkpoint of a run's folder, the best or else the newest; return its address.

    Left out are the optimizer's state, the config, completions and logs, and local paths. Raises a
    ValueError if there is no such checkpoint, or if the hub does not accept it.
    """
    if get_token() is None:
        raise ValueError(f"{name}: run `hf auth login`, or set HF_TOKEN.")
    there = ", ".join(path.name for path in files.all_checkpoints(run))
    if not there:
        raise ValueError(f"{run}: has no checkpoint; name a run's output_dir.")
    if checkpoint is None:
        checkpoint = (
            files.BEST if (run / files.BEST).is_dir() else files.newest_checkpoint(run).name
        )
    folder = (run / checkpoint).resolve()
    if not (folder / files.SUMS_FILE).is_file():
        raise ValueError(f"--checkpoint={checkpoint}: is not in {run}, which has {there}.")
    if damage := files.find_damage(folder):
        raise ValueError(f"{folder} cannot be used: {damage}.")
    if not (folder / CARD_FILE).is_file():
        raise ValueError(f"{folder}: is of an earlier version, which can push it.")
    card = ModelCard.load(folder)
    if card.is_local and not card.has_weights:
        raise ValueError(
            f"{folder}: has only an adapter, and its base model has no name on the hub."
        )
    added = []
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
        content: Path | bytes = path
        if path.name == "README.md":
            content = card.text(name).encode()
        elif path.name in ("config.json", "adapter_config.json"):
            settings = json.loads(path.read_text(encoding="utf-8"))
            # Where an older transformers found the base model; and where this run did.
            for key in settings.keys() & {"_name_or_path", "base_model_name_or_path"}:
                settings[key] = card.public_base
            content = json.dumps(settings, indent=2).encode()
        added.append(CommitOperationAdd(str(path.relative_to(folder)), content))
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        done = api.create_commit(name, added, commit_message=f"{folder.name} of GRPO")
    except Exception as error:  # of the network, the token or the name
        raise ValueError(f"{name}: the hub did not accept it: {describe(error)}") from error
    log.info(f"Pushed {folder} to {name}: {done.commit_url}")
    return str(done.commit_url)


def main() -> None:
    """``torchtune-grpo push``: uploads a run's checkpoint."""
    parser = argparse.ArgumentParser(description="Uploads a checkpoint to the Hugging Face hub.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("name", help="the repository: user/model")
    parser.add_argument("--checkpoint", help="such as step_000020 (default: best, or the newest)")
    parser.add_argument("--public", action="store_true", help="if it makes the repository")
    args = parser.parse_args()
    push(args.run, args.name, checkpoint=args.checkpoint, private=not args.public)
