"""A run's checkpoints: what they hold, and how they are written and read back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.serialization import safe_globals
from torchtune import config, utils

from torchtune_grpo.checkpoint import folder as files
from torchtune_grpo.checkpoint import resume
from torchtune_grpo.checkpoint.model_card import ModelCard
from torchtune_grpo.config.command_line import hub_name
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import read_json
from torchtune_grpo.machine import lock
from torchtune_grpo.machine.device import only_warnings
from torchtune_grpo.machine.parallel import load_once, on_first_rank
from torchtune_grpo.models.adapter import adapter_names, merge_adapter, model_settings, save_adapter
from torchtune_grpo.models.kinds import hf_config_of, kind_of
from torchtune_grpo.training.optimizer import later_bytes

log = utils.get_logger("INFO")

STATE_FILE = "training_state.pt"
RUN_CONFIG_FILE = "run_config.json"
GENERATION_FILE = "generation_config.json"
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
BASE_COPY = ".base"  # in a run's folder
_WEIGHTS = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?|config\.json")
# Files in the base's folder about its own weights, or about how those were made
_OF_THE_BASE = re.compile(
    r"\..*|readme.*|sha256sums|original_repo_id\.json|run_config\.json|torchtune_config\.yaml"
    r"|adapter_.*|train(ing|er)_.*|.*\.(index\.json|safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)",
    re.IGNORECASE,
)
_NESTED = ("original/tokenizer.model", "additional_chat_templates/*")  # torchtune reads the first
# Globals that pickles of numpy's arrays and numbers need; samplers have such values
_NUMPY: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}]
_NUMPY += [value.__reduce__()[0] for value in (np.zeros(0), np.float64())]
_LARGEST_COPY = 100 * 2**20  # bytes; anything larger is weights in some format


class Checkpoints:
    """A run's checkpoint folders, and the model that it starts from.

    Every rank has to call the methods that save or keep; only the first one writes. ``digests``
    say which rows in memory each data set has.
    """

    def __init__(self, cfg: GRPOConfig, *, digests: Mapping[str, str] | None = None) -> None:
        self._digests = digests or {}
        self._cfg, self._node, self._folder = cfg, cfg.checkpointer, Path(cfg.output_dir)
        self._checkpointer = self._make_checkpointer()
        base = Path(self._node.get("checkpoint_dir", "")).absolute()  # PEFT takes "a/b" as a hub's
        self._base, self._base_name = base, hub_name(base) or str(base)
        self.last_step = 0  # step of the checkpoint that the run began with, or wrote last
        self.best: int | None = None  # the step of the checkpoint that is kept beside the last

    def _make_checkpointer(self, **overrides: Any) -> Any:
        staging = str(self._folder / files.STAGING)
        return config.instantiate(self._node, output_dir=staging, **overrides)

    @cached_property
    def _run_config(self) -> dict[str, object]:
        values = resume.run_config(self._cfg, base_files=self._checkpointer._checkpoint_paths)
        return {**values, **self._digests}

    def identity(self, checkpoint: Path | None) -> dict[str, object]:
        """Return all that answers with a checkpoint's weights depend on; None = before training."""
        sums = None if checkpoint is None else (checkpoint / files.SUMS_FILE).read_text()
        return {**self._run_config, "checkpoint": sums, "batch_size * ranks": None}

    def note_config(self) -> None:
        """Note what the run is made from: files may change before the first checkpoint."""
        on_first_rank(getattr, self, "_run_config")

    def base_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights to start from, with the model's names and Hugging Face's row order."""
        return kind_of(model).read(self._checkpointer, self._node)

    def keep_base_files(self, stop_tokens: Sequence[int] = ()) -> None:
        """Copy what saving needs from the base model's folder, which may change or vanish.

        The copy names the tokens that end the policy's responses.
        """
        copy = self._folder / BASE_COPY
        failing = f"output_dir={self._folder}: a copy of checkpointer.checkpoint_dir={self._base}"
        remedy = "Free some space, check permissions, or choose another output_dir."
        with files.staging(self._folder, failing=failing, remedy=remedy) as folder:
            _copy_base_files(self._base, folder)
            _name_stop_tokens(folder, stop_tokens)
            shutil.rmtree(copy, ignore_errors=True)
            folder.rename(copy)
        self._base = self._checkpointer._checkpoint_dir = copy
        self._node = OmegaConf.merge(self._node, {"checkpoint_dir": str(copy)})

    def newest(self) -> Path:
        """Return the newest undamaged checkpoint; raise a ValueError if there is none."""
        return files.newest_checkpoint(self._folder)

    def to_resume(self, restarted: bool = False) -> Path | None:
        """Return the checkpoint to continue; None to start from the base model.

        ``restarted``: by torchrun, which starts a failed rank's group again with the same command.
        If that was before its run had begun, the checkpoints are an earlier run's.

        Raises a ValueError if the newest undamaged checkpoint cannot be continued.
        """
        restarted = restarted and (self._folder / files.BEGUN).exists()
        wanted = self._cfg.resume_from_checkpoint or ("auto" if restarted else False)
        if not wanted or (wanted == "auto" and not files.all_checkpoints(self._folder)):
            return None
        checkpoint = self.newest()
        old, new = read_json(checkpoint, RUN_CONFIG_FILE, key="checkpoint"), self._run_config
        remedy = "start afresh with resume_from_checkpoint=False"
        resume.refuse_changes(old, new, resume.FIXED, checkpoint=checkpoint, remedy=remedy)
        if changed := resume.changed_keys(old, new):
            lines = [f"{key} {was} -> {now}" for key, (was, now) in changed.items()]
            log.info(f"Changed since {checkpoint}: {', '.join(lines)}.")
        step, num_steps = files.step_of(checkpoint), self._cfg.num_steps
        if num_steps < step:
            raise ValueError(
                f"num_steps={num_steps}: {checkpoint} has done {step} steps; give {step} or more."
            )
        return checkpoint

    def check_policy(self, checkpoint: Path) -> None:
        """Raise a ValueError if the run's policy is not the one in the checkpoint."""
        old = read_json(checkpoint, RUN_CONFIG_FILE, key="checkpoint")
        new = resume.run_config(self._cfg)
        remedy = "look at the weights before training with --base"
        resume.refuse_changes(old, new, resume.POLICY, checkpoint=checkpoint, remedy=remedy)

    def restore(self, model: nn.Module, checkpoint: Path) -> dict[str, Any]:
        """Load a checkpoint's weights into a freshly built policy; return the training state."""
        self.last_step = files.step_of(checkpoint)
        # A rank whose model is on meta needs no tensors in memory: rank 0 sends it its shards.
        state = _read_state(checkpoint / STATE_FILE, mapped=next(model.parameters()).is_meta)

        def load() -> None:
            weights = state["adapter"]
            if not weights:
                names = sorted(path.name for path in checkpoint.glob("model*.safetensors"))
                whole = self._make_checkpointer(
                    checkpoint_dir=str(checkpoint), checkpoint_files=names
                )
                weights = kind_of(model).read(whole, self._node)
            _check_same(model, weights, checkpoint)
            model.load_state_dict(weights, strict=False)

        load_once(model, load)
        return state

    def save(
        self,
        model: nn.Module,
        training_state: Mapping[str, object],
        *,
        step: int,
        about: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write ``step_<n>`` beside the others and rename it into place when it is complete.

        ``training_state`` holds tensors and plain values; ``about`` is for the model card.
        """
        weights = resume.whole_on_first_rank(model.state_dict())
        target = files.checkpoint_folder(self._folder, step)

        def write() -> None:
            remedy = "Earlier checkpoints are as they were; what was half written is deleted."
            with lock.writing(self._folder):
                with files.staging(self._folder, failing=str(target), remedy=remedy) as folder:
                    self._write(folder, model, weights, training_state, step, about or {})
                    files.publish(folder, target)
                files.link_best(self._folder, self.best)

        on_first_rank(write)
        self.last_step = step
        self.prune()
        return target

    def prune(self) -> None:
        """Delete all but the last ``saving.keep_last`` checkpoints and the best one."""
        newest = files.checkpoint_folder(self._folder, self.last_step)
        keep = self._cfg.saving.keep_last

        def delete(keep: int) -> None:
            folders = files.all_checkpoints(self._folder)
            # Those after the newest are damaged, or the run would have resumed from one.
            for old in folders[: folders.index(newest) + 1][:-keep]:
                if files.step_of(old) != self.best:
                    with lock.writing(self._folder):
                        files.delete(old)

        if keep is not None:
            on_first_rank(delete, keep)

    def keep_best(self, step: int | None) -> None:
        """From now on keep this step's checkpoint, and the link ``best`` to it.

        If the checkpoint is yet to be saved, saving it makes the link.
        """
        self.best = step
        on_first_rank(files.link_best, self._folder, step)

    def check_room(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise a ValueError if a checkpoint after the first step would not fit on the disk."""
        needed = self.checkpoint_bytes(model, optimizer)

        def check() -> None:
            disk = shutil.disk_usage(self._folder)
            if disk.total and disk.free < needed:
                raise ValueError(
                    f"output_dir={self._folder}: a checkpoint takes about "
                    f"{needed / 2**20:.1f} MiB, and {disk.free / 2**20:.1f} MiB are free on its "
                    "disk; free some space, or choose another output_dir."
                )

        on_first_rank(check)

    def checkpoint_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Estimate the size of a checkpoint after the first step, without small files."""
        parameters = dict(model.named_parameters())
        trained = [p for p in parameters.values() if p.requires_grad]
        total = later_bytes(optimizer, trained)
        adapter = adapter_names(model)
        if adapter:  # saved twice: for others, and for resuming
            total += 2 * sum(p.numel() * p.itemsize for p in trained)
        if not (adapter and self._cfg.saving.adapter_weights_only):
            whole = [p for name, p in parameters.items() if name not in adapter]
            total += sum(p.numel() * p.itemsize for p in whole)  # of NF4 weights: as bfloat16
        return total

    def _write(
        self,
        folder: Path,
        model: nn.Module,
        weights: Mapping[str, Tensor],
        training_state: Mapping[str, object],
        step: int,
        about: Mapping[str, Any],
    ) -> None:
        names = adapter_names(model)
        bad = [name for name in names or weights if not weights[name].isfinite().all()]
        if bad:
            raise ValueError(
                f"{len(bad)} trained tensors, {bad[0]} for one, hold an infinity or a NaN; after "
                "training, resume with a lower optimizer.lr"
            )
        adapter = {name: weights[name].clone() for name in names}
        is_whole = not (adapter and self._cfg.saving.adapter_weights_only)
        if is_whole:
            merged = merge_adapter(weights, model_settings(model)) if adapter else dict(weights)
            self._write_weights(folder, model, merged)
        _copy_base_files(self._base, folder)
        if adapter:
            save_adapter(
                folder / "adapter",
                model,
                weights,
                base_model=self._base_name,
                hf_config=hf_config_of(self._node),
            )
        is_quantized = bool(adapter) and bool(model_settings(model)["quantize_base"])
        ModelCard(
            config=self._run_config,
            step=step,
            base=self._base_name,
            has_weights=is_whole,
            has_adapter=bool(adapter),
            is_quantized=is_quantized,
            **about,
        ).save(folder)
        with (folder / STATE_FILE).open("wb") as file:
            torch.save({**training_state, "adapter": adapter}, file)
        text = json.dumps(self._run_config, indent=2)
        (folder / RUN_CONFIG_FILE).write_text(text, encoding="utf-8")
        for path in filter(Path.is_file, folder.rglob("*")):  # safetensors are private at first
            path.chmod((folder / RUN_CONFIG_FILE).stat().st_mode)

    def _write_weights(self, folder: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Save the weights with the checkpointer, and move them and their config to ``folder``."""
        written = folder / "epoch_0"
        with only_warnings():
            kind_of(model).write(self._checkpointer, self._node, weights, written)
        for path in written.iterdir():
            if _WEIGHTS.fullmatch(path.name):
                path.rename(folder / path.name)
        shutil.rmtree(written)


def check_state(key: str, state: Mapping[str, object]) -> None:
    """Raise a ValueError if a checkpoint with the ``state`` of this key could not be read back."""
    file = BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        _read_state(file)
    except Exception as error:
        held = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{key}: its state_dict() cannot be saved and read back "
            f"({held[1] if held else error}); give tensors, arrays, numbers, texts, lists or dicts."
        ) from error


def _read_state(file: Path | BytesIO, *, mapped: bool = False) -> dict[str, Any]:
    """Read the training state from a file, without running what else a pickle may hold."""
    with safe_globals(_NUMPY):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _copy_base_files(base: Path, folder: Path) -> None:
    """Copy what a checkpoint still lacks to stand alone: settings, tokenizer, licence."""
    paths = [path for path in base.iterdir() if not _OF_THE_BASE.fullmatch(path.name)]
    paths += [path for pattern in _NESTED for path in base.glob(pattern)]
    for path in paths:
        target = folder / path.relative_to(base)
        if not (path.is_dir() or target.exists()) and path.stat().st_size <= _LARGEST_COPY:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _name_stop_tokens(folder: Path, stop_tokens: Sequence[int]) -> None:
    """Let ``generate`` end texts where rollouts did: a base's settings may lack its turn's end."""
    settings, file = json.loads((folder / "config.json").read_text()), folder / GENERATION_FILE
    given = {key: settings[key] for key in _TOKEN_KEYS if key in settings}
    if file.exists():
        given = json.loads(file.read_text())
    ends = given.get("eos_token_id", [])
    known = {*ends} if isinstance(ends, list) else {ends} - {None}
    if not known.issuperset(stop_tokens):
        ends = sorted(known.union(stop_tokens))
        file.write_text(json.dumps(given | {"eos_token_id": ends}, indent=2) + "\n")


def _check_same(model: nn.Module, weights: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Raise a ValueError unless weights have the names, shapes and dtypes that the model trains."""
    saved = {name: _kind(tensor) for name, tensor in weights.items()}
    wanted = dict.fromkeys(saved.keys() - model.state_dict().keys(), "missing")
    wanted |= {name: _kind(p) for name, p in model.named_parameters() if p.requires_grad}
    differing = [
        f"{name} is {saved.get(name, 'missing')} there and {kind} in the model"
        for name, kind in wanted.items()
        if saved.get(name) != kind
    ]
    if differing:
        raise ValueError(
            f"{checkpoint} does not hold what model and dtype train: {'; '.join(differing[:5])} "
            f"({len(differing)} differ). Set both to what they were, or start afresh with "
            "resume_from_checkpoint=False."
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
