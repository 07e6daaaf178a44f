"""The steps around the loop: when a run evaluates, saves and ends, and how it resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torchtune import utils

from torchtune_grpo.checkpoint.resume import optimizer_state
from torchtune_grpo.evaluation.statistics import best_step, should_stop
from torchtune_grpo.machine import interrupt, parallel
from torchtune_grpo.machine.device import seed_step
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.rewards import TrainerState
from torchtune_grpo.run import Run
from torchtune_grpo.training.parts import Parts

log = utils.get_logger("INFO")
_SAVE_MEMORY = (
    "Lower forward_batch_size or rollout.max_rows, or set enable_activation_checkpointing=True: "
    "docs/hardware.md#memory."
)


class Steps:
    """The optimizer steps of a run: iterating yields the metrics of each, to be filled in.

    A new run whose first checkpoint would not fit on the disk ends before its first step.
    """

    def __init__(self, run: Run, parts: Parts) -> None:
        self._run, self._parts, self._cfg = run, parts, parts.cfg
        self._checkpoints = run.checkpoints
        self.done = parts.steps_done  # finished steps
        self._is_stopped = False  # by an evaluation
        parallel.on_first_rank(run.checkpoints.keep_base_files, run.tokenizer.stop_tokens)
        if not self.done:
            run.checkpoints.check_room(parts.policy, parts.optimizer.optimizer)
            return
        utils.log_rank_zero(log, f"Resumed after step {self.done}.")
        self._decide_by_evaluations()
        self._checkpoints.prune()  # a killed run may have saved but not yet deleted

    @contextmanager
    def running(self, save: Callable[[], None]) -> Iterator[None]:
        """Show the progress, and profile; a signal ends the block, and ``save`` is called."""

        def stop() -> None:
            if self.done != self._checkpoints.last_step:
                save()
            text = "There is no checkpoint: the run would start anew."
            if self._checkpoints.last_step:
                text = "The same command goes on from there."
                if not self._cfg.resume_from_checkpoint:
                    text = "Set resume_from_checkpoint=auto to go on from there."
            utils.log_rank_zero(log, f"Interrupted after step {self.done}. {text}")

        run = self._run
        self._checkpoints.note_config()
        with run.interrupts.handled(stop), run.recorder.running(done=self.done), run.profiler:
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise ValueError(f"{error} {_SAVE_MEMORY}") from error

    def __iter__(self) -> Iterator[StepMetrics]:
        while not self.is_over:
            self._seed()
            yield StepMetrics()

    def finish(self, step: StepMetrics) -> None:
        """Record a step that was taken, and tell the sampler how its prompts were solved."""
        run = self._run
        values = step.finish() | run.sampler.metrics
        self.done += 1
        run.profiler.step()
        seen = run.recorder.step(self.done, values)
        self._parts.engine.check_step(values)
        run.sampler.learn(seen["prompt_index"], seen["pass_rate"])

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or an evaluation has ended the run."""
        return self.done >= self._cfg.num_steps or self._is_stopped

    @property
    def is_evaluation_due(self) -> bool:
        """Whether to evaluate now, unless the run did so before it was resumed."""
        if self._run.evaluator is None or not self._is_due(self._cfg.evaluation.every_n_steps):
            return False
        return self.done not in [event["step"] for event in self._run.recorder.evaluations]

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether to save now: this step is the best so far, or one of every few, or the last."""
        return self._checkpoints.best == self.done or self._is_due(self._cfg.saving.every_n_steps)

    def _is_due(self, every: int | None) -> bool:
        return self.done == 0 or self.is_over or (every is not None and self.done % every == 0)

    @property
    def trainer_state(self) -> TrainerState:
        """The run's progress, for the rewards."""
        epoch = self._run.sampler.epoch
        return TrainerState(self.done, max_steps=self._cfg.num_steps, epoch=epoch)

    def evaluate(self) -> None:
        """Evaluate the policy on the held-out prompts."""
        assert self._run.evaluator is not None  # is_evaluation_due
        self._seed()
        evaluation = self._run.evaluator(self._parts.engine, state=self.trainer_state)
        self._run.recorder.evaluation(self.done, evaluation)
        self._decide_by_evaluations()

    def _seed(self) -> None:
        """End an interrupted run, or seed what a resumed run repeats: a step or its evaluation."""
        interrupt.check()
        seed_step(self._cfg.seed, self.done)

    def _decide_by_evaluations(self) -> None:
        """Keep the best checkpoint and end the run, as the evaluations so far say."""
        keys, evaluations = self._cfg.evaluation, self._run.recorder.evaluations
        reason = should_stop(evaluations, metric=keys.keep_best, stop_at=keys.stop_at)
        if reason is not None:
            utils.log_rank_zero(log, reason)
        self._is_stopped = reason is not None
        self._checkpoints.keep_best(best_step(evaluations, keys.keep_best))

    def save(self) -> None:
        """Write the policy and all that a resumed run needs to ``output_dir/step_<n>``."""
        gate, optimizer = self._run.outcome_gate, self._parts.optimizer
        state = {
            "step": self.done,
            "optimizer": optimizer_state(optimizer.optimizer),
            "guard": optimizer.guard.state_dict(),
            "sampler": self._run.sampler.state_dict(),
            "gate": gate is not None and gate.is_shut,
        }
        folder = self._checkpoints.save(
            self._parts.policy,
            state,
            step=self.done,
            about={"results": self._run.recorder.results, "asked": self._run.dataset.asked},
        )
        utils.log_rank_zero(log, f"Saved {folder}")
