"""What a run tells of itself: files, the metric logger, the terminal, findings and the page."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchtune import utils

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import describe, plain
from torchtune_grpo.evaluation.evaluator import Evaluation
from torchtune_grpo.machine.parallel import rank, world_size
from torchtune_grpo.monitor.findings import FindingsWatch, Settings
from torchtune_grpo.monitor.groups import GroupRecorder
from torchtune_grpo.monitor.metric_logger import make_metric_logger
from torchtune_grpo.monitor.progress import RunProgress
from torchtune_grpo.monitor.report import write_page
from torchtune_grpo.monitor.run_log import METRICS_FILE, RunLog
from torchtune_grpo.monitor.summary import evaluation_line, summary
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.rollout import Progress
from torchtune_grpo.trajectory import Trajectory

log = utils.get_logger("INFO")

STARTS_FILE = "starts.jsonl"
_PAGE_EVERY = 10  # steps
_PACKAGES = ("torchtune_grpo", "torch", "torchtune", "torchao", "transformers", "datasets")
_SECRETS = ("token", "secret", "password", "api_key")  # a key of the config that ends so


class Observer:
    """Watches a run; the recipe tells it what happens.

    Args:
        cfg (GRPOConfig): the run's config.
        given (DictConfig): the same as the user gave it.
        rewards (list[str]): their names.
        stop_tokens (Sequence[int]): of the tokenizer.
        device (torch.device): that the run is on.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        given: DictConfig,
        *,
        rewards: list[str],
        stop_tokens: Any,
        device: torch.device,
    ) -> None:
        self._cfg, self._given, self._device = cfg, given, device
        self._folder = Path(cfg.output_dir)
        self._metric_logger = make_metric_logger(cfg.metric_logger)
        self._metric_logger.log_config(given)
        self._log = RunLog(self._folder)
        self._groups = GroupRecorder(
            num_groups=cfg.log_groups,
            group_size=cfg.grpo_samples,
            accuracy_reward=cfg.evaluation.reward,
            stop_tokens=stop_tokens,
            max_generated_tokens=cfg.max_generated_tokens,
            seed=cfg.seed,
        )
        self._accuracy = f"rewards/{cfg.evaluation.reward or rewards[0]}/mean"
        self._findings = FindingsWatch(Settings.from_config(cfg))
        self._progress: RunProgress | None = None

    def resume(self, step: int) -> None:
        """Forgets what was recorded after the step that the run goes on from."""
        self._log.keep_until(step)
        for record in self.records:
            self._findings.add(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """What ``metrics.jsonl`` says; nothing but on the first rank."""
        return self._log.read_metrics()

    def has_evaluation(self, step: int) -> bool:
        """Whether the policy after so many steps was evaluated. Every rank has to ask."""
        return self._log.has_evaluation(step)

    @contextmanager
    def shown(self, *, done: int) -> Iterator[None]:
        """While the run goes on, its line on the terminal; then the page, and a summary.

        Args:
            done (int): steps that it begins with.
        """
        self._log.append(STARTS_FILE, done, [_start(self._given, self._device)])
        steps = self._cfg.num_steps
        with RunProgress(steps, done=done, accuracy=self._accuracy) as self._progress:
            try:
                yield
            finally:
                self._write_page()
        if rank() == 0:
            for line in summary(self.records, self._findings.current, self._folder):
                log.info(line)

    def rollout(self, now: Progress) -> None:
        """How far a rollout is."""
        if self._progress is not None:
            self._progress.rollout(now)

    def scored(self, trajectory: Trajectory, scores: RewardScores) -> None:
        """N rows with advantages, whole groups, and what the rewards say of them."""
        self._groups.scored(trajectory, scores)

    def trained(self, trajectory: Trajectory, logprobs: Tensor) -> None:
        """The rows of the update, and the trainer's log-probs [N, L] before it."""
        self._groups.trained(trajectory, logprobs)

    def step(self, step: int, values: Mapping[str, float]) -> dict[str, list[Any]]:
        """A finished step and its metrics. Every rank has to call it.

        Returns:
            dict[str, list[Any]]: a line of ``prompts.jsonl``, the same on every rank.
        """
        logged = self._metrics(step, values)
        groups, summary = self._groups.take(step)
        self._log.groups(step, groups, share=step / self._cfg.num_steps)
        self._log.append("prompts.jsonl", step, [summary])
        if self._progress is not None:
            self._progress.step_done(step, logged)
        self._tell_findings(step, logged)
        if step % _PAGE_EVERY == 0:
            self._write_page()
        return summary

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """What an evaluation says of the policy after so many steps."""
        logged = self._metrics(step, evaluation.metrics)
        self._log.append("evaluations.jsonl", step, [evaluation.record])
        utils.log_rank_zero(log, f"Step {step}: held-out {evaluation_line(logged)}")
        self._tell_findings(step, logged)

    def _metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        logged = self._log.metrics(step, values)
        self._metric_logger.log_dict(logged, step=step)
        return logged

    def _tell_findings(self, step: int, logged: Mapping[str, float]) -> None:
        """Says each once when it begins and when it ends."""
        for line in self._findings.add(plain({"step": step, **logged})):
            self._log.append("findings.jsonl", step, [line])
            if line["event"] == "ends":
                utils.log_rank_zero(log, f"Finding {line['name']} has ended.")
            elif rank() == 0:
                log.warning(f"Finding {line['name']}: {line['evidence']} {line['remedy']}")

    def _write_page(self) -> None:
        """A page that cannot be written ends no run."""
        if rank() > 0 or not (self._folder / METRICS_FILE).exists():
            return
        try:
            write_page(self._folder)
        except Exception as error:
            log.warning(f"The run's page is not written: {describe(error)}")

    def close(self) -> None:
        """Ends the metric logger."""
        self._metric_logger.close()


def _start(given: DictConfig, device: torch.device) -> dict[str, Any]:
    """What a run was started with, and on what."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "config": _without_secrets(OmegaConf.to_container(given, resolve=True)),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": f"{device.type} {name}".strip(),
        "ranks": world_size(),
        "seed": given.get("seed", 0),
    }


def _command() -> str:
    """As it was typed, but for the interpreter and the folder of what it runs."""
    script, *arguments = sys.orig_argv[1:] or [""]
    return shlex.join([os.path.basename(script), *arguments])


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _without_secrets(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: "..." if str(key).lower().endswith(_SECRETS) else _without_secrets(value)
            for key, value in node.items()
        }
    return [*map(_without_secrets, node)] if isinstance(node, list) else node
