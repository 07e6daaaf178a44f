"""Records a run and shows it: the recipe says what happens, the rest reads the record."""

from __future__ import annotations

import datetime
import io
import os
import platform
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchtune import training, utils

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.text import describe, override_without_secrets, to_json, without_secrets
from torchtune_grpo.evaluation.evaluator import Evaluation
from torchtune_grpo.evaluation.statistics import Comparison, in_one_line
from torchtune_grpo.machine import lock
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank, rank, world_size
from torchtune_grpo.monitor.findings import Ranges, Watch
from torchtune_grpo.monitor.record import (
    RUN_FILE,
    STILL_THE_BASE,
    Measured,
    Record,
    append,
    append_groups,
    changes_weights,
    keep_until,
    metric,
    metrics_of,
    read,
    versions,
)
from torchtune_grpo.monitor.report import write_page
from torchtune_grpo.monitor.terminal import ProgressLine, summary
from torchtune_grpo.rewards import Decider, RewardScores
from torchtune_grpo.rollout.request import Progress
from torchtune_grpo.trajectory import Trajectory

log = utils.get_logger("INFO")

_STEPS_PER_PAGE = 10
_LONGEST_COLUMN = 2_000  # characters of a data set's column; the rest is left out


class Recorder:
    """Writes a run's record on the first rank; ``given`` is the config as the user gave it."""

    def __init__(
        self,
        cfg: GRPOConfig,
        given: DictConfig,
        *,
        rewards: Ranges,
        decider: Decider,
        device: torch.device,
    ) -> None:
        self._cfg, self._given, self._device = cfg, given, device
        self._folder = Path(cfg.output_dir)
        self.evaluations: list[Measured] = []  # the same on every rank
        self.is_base = True  # no step has changed a weight
        self._num_tokens = 0.0
        self._decider, self._ranges = decider, rewards
        self.groups = GroupRecorder(cfg, decider=decider.name)
        self._findings = Watch(cfg, rewards, decider=decider.name)
        self._shown: ProgressLine | None = None
        self.progress: Callable[[Progress], None] = lambda now: None  # shows that of a rollout
        on_first_rank(self._begin)

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with redirect_stdout(io.StringIO()):  # loggers print where they write
            self._metric_logger = instantiate("metric_logger", self._cfg.metric_logger)
        shown = without_secrets(OmegaConf.to_container(self._given, resolve=False))
        self._metric_logger.log_config(OmegaConf.create(shown))

    @property
    def results(self) -> str:
        """The effect of training so far, for a model card."""
        if self.is_base:
            return STILL_THE_BASE
        compared = Comparison.of_run(self.evaluations)
        return f"{compared.headline} {compared.reasons[0]}" if compared else ""

    def resume(self, step: int) -> None:
        """Forget what was recorded after the step from which the run goes on."""
        steps, self.evaluations = on_first_rank(self._keep_until, step)
        self._num_tokens = max((metric(event, "num_tokens") or 0.0 for event in steps), default=0.0)
        self.is_base = not any(map(changes_weights, steps))

    def _keep_until(self, step: int) -> tuple[list[Measured], list[Measured]]:
        if not (self._folder / RUN_FILE).exists():
            log.warning(f"{self._folder / RUN_FILE} is gone: the record begins after step {step}.")
        keep_until(self._folder, step)
        events: list[Any] = read(self._folder, "step", "evaluation")
        for event in events:
            self._findings.add(event)
        steps = [event for event in events if event["kind"] == "step"]
        return steps, [event for event in events if event["kind"] == "evaluation"]

    @contextmanager
    def running(self, *, done: int) -> Iterator[None]:
        """Show the progress from step ``done`` on; at the end write the page and a summary."""
        decider = self._decider
        start = _start(self._given, self._device)
        start["decider"] = decider.name if decider.is_known else None
        declared = {name: own for name, own in self._ranges.items() if own and name != decider.name}
        start["forms"] = [name for name, (lowest, _) in declared.items() if lowest >= 0]
        on_first_rank(append, self._folder, "start", done, start)
        deciding = {f"rewards/{decider.name}/mean": decider.measure}
        with ProgressLine(self._cfg.num_steps, done=done, deciding=deciding) as self._shown:
            self.progress = self._shown.rollout
            try:
                yield
            finally:
                self._write_page()
        if rank() == 0:
            for line in summary(self.evaluations, [*self._findings.current.values()], self._folder):
                log.info(line)
            if self.is_base:
                log.warning(STILL_THE_BASE)

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, list[object]]:
        """Record a finished step; every rank has to call it.

        Returns ``prompt_index``, ``pass_rate`` and ``reward`` of all groups of all ranks.
        """
        self._num_tokens += metrics["num_tokens"]
        metrics = {**metrics, "num_tokens": self._num_tokens}
        if self._device.type == "cuda":
            metrics |= training.get_memory_stats(device=self._device)
        wrong = [scores.wrong for _, scores in self.groups.rollouts if scores.wrong]
        groups, prompts = self.groups.take(step)
        values = {**metrics, "prompts": prompts, **({"wrong": wrong[0]} if wrong else {})}
        event = on_first_rank(self._write_step, step, values, groups)
        self.is_base &= not changes_weights(event)
        if self._shown is not None:
            self._shown.step_done(step, metrics)
        if step == 1 or step % _STEPS_PER_PAGE == 0:
            self._write_page()
        return prompts

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record an evaluation after ``step`` steps; every rank has to call it."""
        values = {**evaluation.record, "time/eval": evaluation.seconds}
        event = on_first_rank(self._write, "evaluation", step, values)
        self.evaluations.append(event)
        utils.log_rank_zero(log, f"Step {step}: {in_one_line(event)}")

    def close(self) -> None:
        if rank() == 0:
            self._metric_logger.close()

    def _write(self, kind: str, step: int, values: Mapping[str, object]) -> Measured:
        """Record a step or an evaluation, and the findings that begin or end with it."""
        event: Any = append(self._folder, kind, step, values)
        self._metric_logger.log_dict(metrics_of(values), step=step)
        for finding in self._findings.add(event):
            append(self._folder, "finding", step, finding)
            if finding["event"] == "ends":
                log.info(f"Finding {finding['name']} has ended.")
            else:
                log.warning(f"Finding {finding['name']}: {finding['evidence']} {finding['remedy']}")
        return event

    def _write_step(
        self, step: int, values: Mapping[str, object], groups: Sequence[Sequence[Record]]
    ) -> Measured:
        event = self._write("step", step, values)
        append_groups(self._folder, groups, done=step / self._cfg.num_steps)
        return event

    def _write_page(self) -> None:
        """Write the page; if that fails, the run goes on without it."""
        if rank() > 0 or lock.is_lost(self._folder):
            return
        try:
            write_page(self._folder)
        except Exception as error:
            log.warning(f"The run's page is not written: {describe(error)}")


class GroupRecorder:
    """Chooses which groups of each step are kept whole, informative ones first."""

    def __init__(self, cfg: GRPOConfig, *, decider: str) -> None:
        self._cfg, self._decider = cfg, decider
        self.rollouts: list[tuple[Trajectory, RewardScores]] = []  # since the last take
        self._trainer_logprobs: dict[tuple[int, ...], float] = {}

    def rollout(self, trajectory: Trajectory, scores: RewardScores) -> None:
        """Note N rows with advantages, in whole groups, and their rewards."""
        self.rollouts.append((trajectory, scores))

    def update(self, trajectory: Trajectory, logprobs: Tensor) -> None:
        """Note the trainer's log-probs [N, L] of an update's rows, from before the update."""
        means = _mean_logprobs(trajectory, logprobs)
        self._trainer_logprobs |= dict(zip(_identities(trajectory), means, strict=True))

    def take(self, step: int) -> tuple[list[list[Record]], dict[str, list[object]]]:
        """Return chosen groups and all groups' results, of all ranks, since the last call.

        A chosen group is a list with a record for each completion. The choice among equally
        informative groups depends on seed, step and prompt alone. Results are ``prompt_index``,
        ``pass_rate`` and ``reward`` (None where none applies), in the order of the step's prompts.
        """
        count, size = self._cfg.log_groups, self._cfg.grpo_samples
        candidates: list[Any] = []
        results: list[tuple[object, ...]] = []
        for trajectory, scores in self.rollouts:
            informative = trajectory.is_informative.view(-1, size).any(dim=1).tolist()  # [B]
            indices = trajectory.prompt_indices[::size].tolist()
            for group, (teaches, index) in enumerate(zip(informative, indices, strict=True)):
                chance = random.Random(f"{self._cfg.seed} {step} {index}").random()
                key = (not teaches, chance, index)
                candidates.append((key, trajectory, scores, group * size))
            measured = (scores.of(self._decider), scores.total)
            means = (values.view(-1, size).nanmean(dim=1) for values in measured)
            columns = (trajectory.step_indices[::size], trajectory.prompt_indices[::size], *means)
            results += zip(*map(to_json, columns), strict=True)
        candidates.sort(key=lambda each: each[0])
        mine = [(key, self._records(t, s, row, step)) for key, t, s, row in candidates[:count]]
        self.rollouts, self._trainer_logprobs = [], {}
        kept, found = zip(*gather_over_ranks((mine, results)), strict=True)
        chosen = sorted(chain.from_iterable(kept), key=lambda each: each[0])[:count]
        in_order = sorted(chain.from_iterable(found))
        names = ("prompt_index", "pass_rate", "reward")
        by_name = {name: [each[i + 1] for each in in_order] for i, name in enumerate(names)}
        return [records for _, records in chosen], by_name

    def _records(
        self, trajectory: Trajectory, scores: RewardScores, first: int, step: int
    ) -> list[Record]:
        """Return a record for each completion of the group that begins at row ``first``."""
        numbers = torch.arange(first, first + self._cfg.grpo_samples)
        rows = trajectory.select(numbers.to(trajectory.tokens.device))
        assert rows.advantages is not None
        sampler, lengths = _mean_logprobs(rows, rows.sampler_logprobs), rows.sampled_lengths
        records = []
        for sample, identity in enumerate(_identities(rows)):
            row, completion = first + sample, rows.completions[sample]
            failed = zip(scores.names, scores.failed[row].tolist(), strict=True)
            record = {
                "step": step,
                "prompt_index": identity[0],
                "sample": sample,
                "prompt": str(rows.prompts[sample]),
                "columns": {
                    name: logged_column(each[sample]) for name, each in rows.columns.items()
                },
                "completion": str(completion),
                "tokens": lengths[sample],
                "ended": completion.ended,
                "reward": scores.total[row],
                "rewards": dict(zip(scores.names, scores.scores[row].tolist(), strict=True)),
                "failed": [name for name, is_failed in failed if is_failed],
                "advantage": rows.advantages[sample],
                "sampler_logprob": sampler[sample],
                "trainer_logprob": self._trainer_logprobs.get(identity),
                "extra": {name: values[row] for name, values in scores.extra.items()},
            }
            if completion.kind:
                record["messages"] = completion.messages
            if completion.inline:
                record["inline"] = completion.inline
            records.append(to_json(record))
        return records


def _identities(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Return prompt and tokens of each completion, which identify it after rows have moved."""
    indices = trajectory.prompt_indices.tolist()
    return [(i, *ids) for i, ids in zip(indices, trajectory.response_ids, strict=True)]


def _mean_logprobs(trajectory: Trajectory, logprobs: Tensor) -> list[float]:
    """Return the means over each row's trained tokens: [N, L] -> N numbers, NaN if it has none."""
    mask = trajectory.response_mask
    return (logprobs.where(mask, 0).sum(dim=1) / mask.sum(dim=1)).tolist()


def logged_column(value: object) -> object:
    """Return a column's value as ``completions.jsonl`` has it."""
    value = to_json(value)
    return value[:_LONGEST_COLUMN] if isinstance(value, str) else value


def _start(given: DictConfig, device: torch.device) -> Record:
    """Describe how a run was started, and on which device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    script, *arguments = sys.orig_argv[1:] or [""]  # without the interpreter
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(
            [os.path.basename(script), *map(override_without_secrets, arguments)]
        ),
        "config": without_secrets(OmegaConf.to_container(given, resolve=True)),
        "versions": versions(),
        "device": f"{device.type} {name}".strip(),
        "ranks": world_size(),
        "seed": given.get("seed", 0),
    }
