"""What is saved, so that a resumed run continues, and users can load the result elsewhere.

A checkpoint is a folder ``step_<n>``, written atomically:

    step_000020/
        model*.safetensors, config.json, tokenizer ...  merged weights, as transformers loads them
        adapter/adapter_model.safetensors, adapter_config.json    LoRA or DoRA in PEFT's format
        training_state.pt                                what resuming needs
        run_config.json                                  the config it was written under
        README.md                                        a model card
        SHA256SUMS                                       of all these
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import config, utils

from torchtune_grpo.checkpoint.base_files import keep_base_files
from torchtune_grpo.checkpoint.checksums import find_damage, sync, write_sums
from torchtune_grpo.checkpoint.claim import STAGING, delete
from torchtune_grpo.checkpoint.model_card import model_card
from torchtune_grpo.checkpoint.run_config import POLICY, changed_keys, refuse_changes, run_config
from torchtune_grpo.checkpoint.whole_state import full_state, later_bytes, optimizer_state
from torchtune_grpo.config.command_line import hub_name
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.machine.device import only_warnings
from torchtune_grpo.machine.parallel import on_first_rank
from torchtune_grpo.models import (
    adapter_names,
    load_weights,
    merged_state,
    save_adapter,
    save_weights,
)
from torchtune_grpo.monitor.record import read
from torchtune_grpo.training.optimizer import NonFiniteError

log = utils.get_logger("INFO")

BEST = "best"  # a link to a checkpoint
STATE_FILE = "training_state.pt"
RUN_CONFIG_FILE = "run_config.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those that there are can be read."""


class Checkpoints:
    """The checkpoint folders ``step_<n>`` of a run, and the folder that it starts from.

    Args:
        cfg (DictConfig): the config's node of torchtune's checkpointer.
        output_dir (Path): the run's folder.
        adapter_only (bool): leave out the merged weights (models with adapters only).
        keep_last (int | None): delete all but this many newest checkpoints after each save.
        run (GRPOConfig | None): the config of a run, saved with its checkpoints, and compared with
            that of the one to resume.
    """

    def __init__(
        self,
        cfg: DictConfig,
        *,
        output_dir: Path,
        adapter_only: bool = False,
        keep_last: int | None = None,
        run: GRPOConfig | None = None,
    ) -> None:
        self._cfg = cfg
        self._folder = output_dir
        self._adapter_only = adapter_only
        self._keep_last = keep_last
        self._checkpointer = self._make_checkpointer()
        self.last_step = 0  # of the checkpoint that the run began with, or wrote last
        self.best: int | None = None  # of the one that is kept beside the last
        self._run_config: dict[str, Any] = {}
        if run is not None:
            files = self._checkpointer._checkpoint_paths
            self._run_config = run_config(run, base_files=files)

    @classmethod
    def of_run(cls, cfg: GRPOConfig) -> Checkpoints:
        """Those of a config's run."""
        return cls(
            cfg.checkpointer,
            output_dir=Path(cfg.output_dir),
            adapter_only=cfg.saving.adapter_weights_only,
            keep_last=cfg.saving.keep_last,
            run=cfg,
        )

    def _make_checkpointer(self, **overrides: Any) -> Any:
        """The config's, but writing into the staging folder."""
        staging = str(self._folder / STAGING)
        return config.instantiate(self._cfg, output_dir=staging, **overrides)

    def base_weights(self) -> dict[str, Any]:
        """The weights to start from, in torchtune's names and Hugging Face's order of rows."""
        return load_weights(self._checkpointer, self._cfg)

    def newest(self) -> Path:
        """The newest checkpoint whose files are as they were written; warns of newer ones.

        Raises:
            ValueError: if there is no checkpoint.
            CheckpointError: if all are damaged.
        """
        folders = _by_step(self._folder)[::-1]
        for folder in folders:
            damage = find_damage(folder)
            if damage is None:
                return folder
            log.warning(f"{folder} cannot be used: {damage}.")
        if folders:
            raise CheckpointError(
                f"output_dir={self._folder}: all of its checkpoints are damaged. Restore one, or "
                "start afresh with resume_from_checkpoint=False."
            )
        raise ValueError(
            f"resume_from_checkpoint=True: output_dir={self._folder} holds no complete "
            "checkpoint; set it to False to start afresh, or name the interrupted run's output_dir."
        )

    def to_resume(self) -> Path:
        """The newest undamaged checkpoint, if the run's config may continue it; logs what changed.

        Every rank has to call it.

        Raises:
            ValueError: if there is none, or a key of the config differs that must not.
            CheckpointError: if all are damaged.
        """
        checkpoint = on_first_rank(self.newest)
        changed = changed_keys(_config_of(checkpoint), self._run_config, checkpoint=checkpoint)
        if changed:
            utils.log_rank_zero(log, f"Changed since {checkpoint}: {', '.join(changed)}.")
        step, num_steps = _step_number(checkpoint), self._run_config["num_steps"]
        if num_steps < step:
            raise ValueError(
                f"num_steps={num_steps}: {checkpoint} has done {step} steps; give {step} or more."
            )
        return checkpoint

    def check_policy(self, checkpoint: Path) -> None:
        """Raises a ValueError if the run's policy is not the one that a checkpoint holds."""
        refuse_changes(
            _config_of(checkpoint),
            self._run_config,
            checkpoint=checkpoint,
            remedy="look at the weights before training with --base",
            below=POLICY,
        )

    def restore(self, model: nn.Module, checkpoint: Path) -> dict[str, Any]:
        """Gives a freshly built policy the weights of a checkpoint; returns the training's state.

        Raises:
            ValueError: if its weights are not those that the model trains.
        """
        self.last_step = _step_number(checkpoint)
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        weights = state["adapter"]
        if not weights:
            files = sorted(path.name for path in checkpoint.glob("model*.safetensors"))
            whole = self._make_checkpointer(checkpoint_dir=str(checkpoint), checkpoint_files=files)
            weights = load_weights(whole, self._cfg)
        _check_same(model, weights, checkpoint)
        model.load_state_dict(weights, strict=False)
        return state

    def how_to_resume(self) -> str:
        """A line for the user of a run that was interrupted."""
        if not self.last_step:
            return "Interrupted before the first step was done; the same command starts anew."
        folder = self._folder / _folder_name(self.last_step)
        return (
            f"Interrupted. To go on from {folder}, repeat the command with "
            "resume_from_checkpoint=True"
        )

    def save(self, model: nn.Module, training_state: Mapping[str, Any], *, step: int) -> Path:
        """Writes ``step_<n>`` beside the others and renames it into place when it is complete.

        Every rank has to call it; the first one writes, and the others wait.

        Args:
            model (nn.Module): the policy.
            training_state (Mapping[str, Any]): tensors and plain values that a run resumes from.
            step (int): number of finished steps.

        Returns:
            Path: the checkpoint folder.

        Raises:
            CheckpointError: if it cannot be written; what was there before still is.
            NonFiniteError: if weights are infinite or NaN.
        """
        state = full_state(model)
        target = self._folder / _folder_name(step)
        on_first_rank(self._save, model, state, training_state, target)
        self.last_step = step
        return target

    def keep_best(self, step: int | None) -> None:
        """From now on keeps this step's checkpoint, and the link ``best`` to it.

        Every rank has to call it. The checkpoint may be about to be saved; then the link follows.
        """
        self.best = step
        on_first_rank(self._link_best)

    def _link_best(self) -> None:
        link, name = self._folder / BEST, _folder_name(self.best or 0)
        if self.best is None:
            link.unlink(missing_ok=True)
        elif (self._folder / name).is_dir():
            beside = link.with_name(f"{BEST}.new")
            beside.unlink(missing_ok=True)
            try:
                beside.symlink_to(name)
                beside.replace(link)
            except OSError as error:
                log.warning(f"{link}: cannot be linked to {name}, which is the best: {error}.")

    def rehearse(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes a checkpoint as :meth:`save` does, and deletes it: what would fail fails now.

        Every rank has to call it.

        Raises:
            CheckpointError: if a checkpoint cannot be written, or would not fit with the
                optimizer's later states.
            NonFiniteError: if the weights to start from are infinite or NaN.
        """
        state = full_state(model)
        training_state = {"optimizer": optimizer_state(optimizer)}
        on_first_rank(self._rehearse, model, state, training_state, later_bytes(optimizer))

    def _rehearse(
        self,
        model: nn.Module,
        state: Mapping[str, Tensor],
        training_state: Mapping[str, Any],
        later: int,
    ) -> None:
        base = f"checkpointer.checkpoint_dir={self._cfg.get('checkpoint_dir')}"
        remedy = "Mend its files, or name another folder."
        _check_finite(model, state, what=f"{base}: a checkpoint of its weights", remedy=remedy)
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._written(
            f"output_dir={self._folder}: a checkpoint, written there on trial,",
            remedy=f"Give it room and rights, or name another folder; or mend {base}.",
        ):
            folder = self._write(model, state, training_state, _folder_name(0))
            disk = shutil.disk_usage(folder)
            if disk.total and disk.free < later:
                raise OSError(
                    f"beside the weights, {disk.free / 2**20:.1f} MiB are free on the disk, and "
                    f"the optimizer's states will take about {later / 2**20:.1f} MiB"
                )
            shutil.rmtree(self._folder / STAGING)

    def _save(
        self,
        model: nn.Module,
        state: Mapping[str, Tensor],
        training_state: Mapping[str, Any],
        target: Path,
    ) -> None:
        remedy = "Resume from an earlier checkpoint with a lower optimizer.lr."
        _check_finite(model, state, what=str(target), remedy=remedy)
        remedy = "What was half written is deleted, and earlier checkpoints are as they were."
        with self._written(str(target), remedy=remedy):
            folder = self._write(model, state, training_state, target.name)
            write_sums(folder)
            _publish(folder, target)
        self._link_best()
        if self._keep_last is not None:
            _delete_older(target, keep=self._keep_last, best=self.best)

    @contextmanager
    def _written(self, what: str, *, remedy: str) -> Iterator[None]:
        """Where the block fails, deletes what it has written, and raises a CheckpointError."""
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        try:
            yield
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            # torch.save raises an error of its own while it handles that of the file.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise CheckpointError(f"{what} is not saved: {cause}. {remedy}") from error

    def _write(
        self,
        model: nn.Module,
        state: Mapping[str, Tensor],
        training_state: Mapping[str, Any],
        name: str,
    ) -> Path:
        """Writes all but the sums into a folder of the staging folder."""
        epoch = _step_number(Path(name))
        folder = self._folder / STAGING / f"epoch_{epoch}"  # as torchtune's checkpointer does
        folder.mkdir(parents=True)
        adapter = {name: state[name].clone() for name in adapter_names(model)}
        if not (adapter and self._adapter_only):
            merged = merged_state(model, state) if adapter else dict(state)
            with only_warnings():  # of files that are about to be renamed
                save_weights(self._checkpointer, self._cfg, merged, epoch=epoch)
        base = Path(self._cfg.checkpoint_dir)
        keep_base_files(base, folder)
        if adapter and self._cfg.get("model_type") in ("PHI3_MINI", "PHI4"):
            log.warning("No adapter in PEFT's format: transformers fuses Phi's projections.")
        elif adapter:
            name_or_path = hub_name(base) or str(base)
            save_adapter(folder / "adapter", model, adapter, base_model=name_or_path)
        card = model_card(
            self._run_config,
            self._evaluations(until=epoch),
            base=hub_name(base) or str(base),
            is_on_hub=hub_name(base) is not None,
            step=epoch,
            folder=name,
            has_weights=not (adapter and self._adapter_only),
            has_adapter=(folder / "adapter").exists(),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        with (folder / STATE_FILE).open("wb") as file:
            torch.save({**training_state, "adapter": adapter}, file)
        text = json.dumps(self._run_config, indent=2)
        (folder / RUN_CONFIG_FILE).write_text(text, encoding="utf-8")
        for path in filter(Path.is_file, folder.rglob("*")):  # safetensors are private at first
            path.chmod((folder / RUN_CONFIG_FILE).stat().st_mode)
        return folder

    def _evaluations(self, *, until: int) -> list[dict[str, Any]]:
        return [event for event in read(self._folder, "evaluation") if event["step"] <= until]


def set_aside_previous_run(cfg: GRPOConfig) -> None:
    """Moves what an earlier run left in ``output_dir`` to ``previous_runs/<n>`` there.

    Otherwise the new run, once interrupted, could resume from the old one's checkpoint. Logs and
    profiles move along if they have a folder of their own in ``output_dir``.
    """
    output_dir = Path(cfg.output_dir)
    names = (BEST, "step_*", "*.jsonl", "*.jsonl.new", "nonfinite")
    left = [path for name in names for path in output_dir.glob(name)]
    if not left:
        return
    left += [
        path for name in ("torchtune_config.yaml", "run.html") for path in output_dir.glob(name)
    ]
    logger, profiler = cfg.metric_logger, cfg.profiler or {}
    for folder in (logger.get("log_dir"), logger.get("dir"), profiler.get("output_dir")):
        path = output_dir / os.path.relpath(folder or output_dir, output_dir)
        if path.exists() and output_dir in path.parents and ".." not in path.parts:
            left.append(path)
    archive = output_dir / "previous_runs"
    archive.mkdir(exist_ok=True)
    runs = [int(path.name) for path in archive.iterdir() if path.name.isdecimal()]
    target = archive / str(1 + max(runs, default=0))
    target.mkdir()
    for path in filter(Path.exists, left):  # a folder may lie in one that has moved already
        new = target / path.relative_to(output_dir)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
    log.info(f"Moved the previous run's files from {output_dir} to {target}.")


def _publish(folder: Path, target: Path) -> None:
    """Renames a complete folder into place."""
    if target.exists():
        delete(target)
    folder.rename(target)
    sync(target.parent)
    shutil.rmtree(folder.parent)


def _delete_older(newest: Path, *, keep: int, best: int | None = None) -> None:
    """Deletes all but the newest checkpoints, and the best.

    Those of later steps are damaged, or the run would have resumed from one; they do not count.
    """
    steps = _by_step(newest.parent)
    for old in steps[: steps.index(newest) + 1][:-keep]:
        if _step_number(old) != best:
            delete(old)


def _check_same(model: nn.Module, weights: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Raises a ValueError unless weights have the names, shapes and dtypes that a model trains."""
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    differing = [f"{name} is missing" for name in expected.keys() - weights.keys()]
    differing += [
        f"{name} is not the model's" for name in weights.keys() - model.state_dict().keys()
    ]
    differing += [
        f"{name} is {_kind(weights[name])}, the model's {_kind(parameter)}"
        for name, parameter in expected.items()
        if name in weights and _kind(weights[name]) != _kind(parameter)
    ]
    if differing:
        raise ValueError(
            f"{checkpoint} does not hold what model and dtype train: {'; '.join(differing[:5])} "
            f"({len(differing)} differ). Set both to what they were, or start afresh with "
            "resume_from_checkpoint=False."
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_finite(model: nn.Module, state: Mapping[str, Tensor], *, what: str, remedy: str) -> None:
    """Raises a NonFiniteError if one of a model's trained tensors is infinite or NaN."""
    bad = [name for name in adapter_names(model) or state if not state[name].isfinite().all()]
    if bad:
        raise NonFiniteError(
            f"{what} is not saved: {len(bad)} trained tensors, {bad[0]} for one, hold an infinity "
            f"or a NaN. {remedy}"
        )


def _config_of(checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint / RUN_CONFIG_FILE).read_text(encoding="utf-8"))
    return config


def _by_step(folder: Path) -> list[Path]:
    """Checkpoints, whole or damaged, oldest first."""
    names = [path for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    return sorted(names, key=_step_number)


def _folder_name(step: int) -> str:
    return f"step_{step:06d}"


def _step_number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
