"""Weights read from and written to a folder, under torchtune's and Hugging Face's names."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchtune import training

from torchtune_grpo.config.text import describe, read_json, shortened
from torchtune_grpo.models.build import hf_model, read_config
from torchtune_grpo.models.families import FAMILIES

_FILES = ("model.safetensors", "pytorch_model.bin")


def hf_state(state_dict: Mapping[str, Tensor], model_dir: str | Path) -> dict[str, Tensor]:
    """Rename a state dict of a folder's model from torchtune's names to Hugging Face's."""
    parts = {
        theirs: [state_dict[name] for name in ours]
        for theirs, ours in parts_by_hf_name(state_dict, model_dir).items()
    }
    return {n: torch.cat(p) if len(p) > 1 else p[0].contiguous() for n, p in parts.items()}


def parts_by_hf_name(names: Iterable[str], model_dir: str | Path) -> dict[str, list[str]]:
    """Map Hugging Face's names of a folder's model to torchtune's: several, in order, if fused."""
    known = FAMILIES[read_config(model_dir).model_type].names
    result = defaultdict[str, list[str]](list)
    for name in names:
        layer, module, leaf = re.findall(r"(layers\.\d+\.)?(.+)\.(\w+)", name)[0]
        leaf = "weight" if leaf == "scale" else leaf
        result[f"{layer and 'model.'}{layer}{known[module]}.{leaf}"].append(name)
    return dict(result)


class HFCheckpointer:
    """Reads and writes a model's folder; has the methods of torchtune's checkpointers.

    ``checkpoint_dir`` holds ``config.json`` and the weights in ``checkpoint_files``; None finds
    them. Written files have at most ``max_shard_size``, in bytes or as in "5GB".
    """

    def __init__(
        self,
        checkpoint_dir: str,
        output_dir: str,
        checkpoint_files: Sequence[str] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        self._checkpoint_dir, self._output_dir = Path(checkpoint_dir), Path(output_dir)
        self._max_shard_size = max_shard_size
        names = checkpoint_files or weight_files(self._checkpoint_dir)
        self._checkpoint_paths = [self._checkpoint_dir / name for name in names]
        if missing := [path.name for path in self._checkpoint_paths if not path.is_file()]:
            raise ValueError(
                f"checkpoint_dir={checkpoint_dir}: {missing[0]} is missing; fetch the model again."
            )

    def load_checkpoint(self) -> dict[str, object]:
        """Return ``{training.MODEL_KEY: weights}``, with all weights under torchtune's names."""
        with torch.device("meta"):
            expected = hf_model(str(self._checkpoint_dir)).state_dict()
        names = parts_by_hf_name(expected, self._checkpoint_dir)
        state, problems, spare_head = dict[str, Tensor](), [], None
        for name, value in self._tensors():
            if f"model.{name}" in names:  # saved without a head
                name = f"model.{name}"
            if name in names:
                parts = [expected[part] for part in names[name]]
                rows, rest = [len(part) for part in parts], parts[0].shape[1:]
                if value.shape != (sum(rows), *rest):
                    wanted = f"{list(value.shape)}, not {[sum(rows), *rest]}"
                    problems.append(f"{name} is {wanted}")
                    rows = [len(value)] + [0] * (len(rows) - 1)
                state |= zip(names[name], value.split(rows), strict=True)
            elif name == "lm_head.weight":
                spare_head = value
            elif not name.endswith("rotary_emb.inv_freq"):
                problems.append(f"{name} is unexpected")
        problems += [f"{name} is missing" for name in names if names[name][0] not in state]
        if problems:
            raise ValueError(
                f"checkpoint_dir={self._checkpoint_dir}: its weights do not match its config.json: "
                f"{'; '.join(problems[:3])} ({len(problems)} differ). Fetch the model again."
            )
        if spare_head is not None and not torch.equal(spare_head, state["tok_embeddings.weight"]):
            raise ValueError(
                f"checkpoint_dir={self._checkpoint_dir}: config.json says tie_word_embeddings="
                "true, but lm_head.weight differs from the embeddings, and transformers computes "
                "with it. "
                "Set tie_word_embeddings to false there, or remove lm_head.weight."
            )
        return {training.MODEL_KEY: state}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._checkpoint_paths:
            try:
                if path.suffix == ".safetensors":
                    tensors = load_file(path)
                else:
                    tensors = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # of any type: each format has its own
                raise ValueError(
                    f"checkpoint_dir={self._checkpoint_dir}: could not read {path.name} "
                    f"({path.stat().st_size} bytes): {shortened(describe(error), 300)}. Fetch it "
                    "again; a file of some 130 bytes only points to what `git lfs pull` fetches."
                ) from error
            yield from tensors.items()

    def save_checkpoint(self, state_dict: dict[str, Any], epoch: int) -> None:
        """Write weights, given under torchtune's names, and ``config.json`` to ``epoch_<n>``."""
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        weights = hf_state(state_dict[training.MODEL_KEY], self._checkpoint_dir)
        config = json.loads((self._checkpoint_dir / "config.json").read_text(encoding="utf-8"))
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Not by save_torch_state_dict, which refuses weights that are parts of one tensor.
        shards = split_torch_state_dict_into_shards(weights, max_shard_size=self._max_shard_size)
        for file, names in shards.filename_to_tensors.items():
            save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            (folder / f"{_FILES[0]}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights of a model's folder."""
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            content = read_json(folder, index.name, key="checkpoint_dir")
            if not content.get("weight_map"):
                raise ValueError(
                    f"checkpoint_dir={folder}: {index.name} has no weight_map. Fetch it again."
                )
            return sorted(set(content["weight_map"].values()))
        if (folder / name).is_file():
            return [name]
    raise ValueError(
        f"checkpoint_dir={folder}: has neither {_FILES[0]} nor {_FILES[0]}.index.json; name the "
        "folder of a model."
    )
