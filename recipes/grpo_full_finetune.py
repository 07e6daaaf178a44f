"""GRPO: reinforcement learning from verifiable rewards, as in the paper.

    for each step:
        sample a group of completions for each prompt, and score them with the rewards
        advantage of a completion = its reward, centred and scaled within its group
        ppo_epochs times, in num_minibatches parts of the groups: an optimizer step on the
            clipped surrogate + KL to the reference

Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), algorithm 1. Departures: the reference is
the initial policy throughout (one outer iteration).

On one device or, under torchrun, on many: every rank then rolls out, scores and trains on its own
prompts. The loss's denominator is that of all ranks, so the same prompts give the same step on any
number of them.

Shapes: B prompts of this rank, G samples in a group, N = B*G rows, T prompt + response, L response.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune import config, modules, training, utils
from torchtune.recipe_interfaces import FTRecipeInterface

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.checkpoint import (
    Checkpoints,
    claim_output_dir,
    optimizer_state,
    restore_optimizer,
    set_aside_previous_run,
)
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import parse
from torchtune_grpo.config.components import instantiate
from torchtune_grpo.data import PromptBatch, make_sampler, prompts_of_rank
from torchtune_grpo.data.load_data import load_data
from torchtune_grpo.dynamic_sampling import DynamicSampling, Resampling
from torchtune_grpo.evaluation.evaluator import Course, Evaluator
from torchtune_grpo.loss import LossOutput, make_loss
from torchtune_grpo.machine import parallel
from torchtune_grpo.machine.device import find_device, keep_freed_memory, limit_threads, set_seed
from torchtune_grpo.machine.interrupt import Interrupts, exit_on_signals
from torchtune_grpo.monitor.metric_logger import make_profiler
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.monitor.record import Observer
from torchtune_grpo.rewards import RewardScores, RewardSet, TrainerState
from torchtune_grpo.rollout import make_engine, roll_out
from torchtune_grpo.training import in_order, response_logprobs, trajectory_logprobs
from torchtune_grpo.training.importance import importance_weights
from torchtune_grpo.training.mini_batches import MiniBatch, mini_batches
from torchtune_grpo.training.optimizer import (
    NonFiniteGuard,
    make_lr_scheduler,
    make_optimizer,
    optimizer_step,
    total_grad_norm,
)
from torchtune_grpo.training.policy import build_policy, empty_model, should_shard
from torchtune_grpo.training.policy_checks import check_model
from torchtune_grpo.training.reference import make_reference
from torchtune_grpo.trajectory import Trajectory

log = utils.get_logger("INFO")


class GRPOFullFinetuneRecipe(FTRecipeInterface):
    """GRPO for LoRA, QLoRA, DoRA and full fine-tuning, on one device or under torchrun.

    With adapters the reference policy is the model with its adapters switched off, or as
    ``adapter_dir`` has them. Full fine-tuning keeps a copy; ``loss.kl_coeff: 0`` needs none.

    On several ranks, ``distributed.sharding`` says whether each holds the whole model (only
    gradients cross the wire) or a part of it (FSDP2). ``batch_size`` and ``forward_batch_size`` are
    those of one rank.

    Args:
        cfg (DictConfig): the config; ``torchtune-grpo config`` lists its keys.

    Raises:
        ValueError: naming the config key, the value and the remedy.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = read_config(cfg)
        self._device = find_device(self.cfg.device)
        parallel.init_process_group(self._device)
        parallel.on_first_rank(claim_output_dir, Path(self.cfg.output_dir))
        self.seed = set_seed(self.cfg.seed)
        self.global_step = 0
        self.interrupts = Interrupts()

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; what can be wrong with the config fails before weights are read."""
        parallel.on_first_rank(config.instantiate, self.cfg.prepare)
        check_model(self.cfg)
        if self._device.type == "cpu":
            keep_freed_memory()
            limit_threads(empty_model(self.cfg))
        self._is_sharded = should_shard(self.cfg, device=self._device)
        self._checkpoints = Checkpoints.of_run(self.cfg)
        self._course = Course(self.cfg, self._checkpoints)
        checkpoint = self._checkpoints.to_resume() if self.cfg.resume_from_checkpoint else None
        self._tokenizer = instantiate("tokenizer", self.cfg.tokenizer)
        self._rewards = RewardSet.from_config(
            self.cfg.rewards, max_failure_share=self.cfg.max_reward_failure_share
        )
        self._loss = make_loss(self.cfg.loss)
        self._setup_data()
        if checkpoint is None:
            parallel.on_first_rank(set_aside_previous_run, self.cfg)

        self._observer = Observer(
            self.cfg,
            cfg,
            rewards=self._rewards.names,
            stop_tokens=self._tokenizer.stop_tokens,
            device=self._device,
        )
        self._guard = NonFiniteGuard(Path(self.cfg.output_dir))
        self._profiler = make_profiler(self.cfg.profiler)

        home = torch.device("cpu") if self._is_sharded else self._device
        self._model = build_policy(self.cfg, self._checkpoints.base_weights(), device=home)
        parallel.broadcast_trained_parameters(self._model)
        self._reference = (
            make_reference(self._model, self.cfg) if self._loss.needs_reference else None
        )
        state = self._checkpoints.restore(self._model, checkpoint) if checkpoint else None
        self._engine = make_engine(
            self._model,
            self.cfg.rollout,
            is_sharded=self._is_sharded,
            device=self._device,
        )
        self._setup_passes()
        self._optimizer = make_optimizer(self.cfg.optimizer, self._model.parameters())
        self._lr_scheduler = make_lr_scheduler(self.cfg, self._optimizer)
        if state is None:
            self._checkpoints.rehearse(self._model, self._optimizer)
        else:
            self._resume(state)

    def _setup_data(self) -> None:
        data = load_data(self.cfg, tokenizer=self._tokenizer, rewards=self._rewards)
        self._dataset, self._evaluator = data["dataset"], None
        if "eval_dataset" in data:
            self._evaluator = Evaluator(
                self.cfg, data["eval_dataset"], tokenizer=self._tokenizer, rewards=self._rewards
            )
        self._sampler = make_sampler(self.cfg.sampler, self._dataset, seed=self.seed)
        self._dynamic_sampling = DynamicSampling(
            self.cfg, rewards=self._rewards, tokenizer=self._tokenizer, dataset=self._dataset
        )
        self._next_prompts()  # fails if there are too few

    def _setup_passes(self) -> None:
        """Compiles, checkpoints and shards the layers, after all that copies or loads weights."""
        if self.cfg.compile:
            training.compile_model(self._model, verbose=False)
        if self.cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(
                self._model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
            )
        if self._is_sharded:
            parallel.shard(self._model, self.cfg.distributed, device=self._device)
            if self._reference is not None:
                self._reference.shard(self.cfg.distributed, device=self._device)

    def _resume(self, state: dict[str, Any]) -> None:
        done = state["step"] * self.cfg.updates_per_step
        restore_optimizer(self._optimizer, self._lr_scheduler, state["optimizer"], steps=done)
        self._guard.load_state_dict(state["guard"])
        self._sampler.load_state_dict(state["sampler"])
        parallel.restore_random_state(state["torch_rng"], self._device)
        self.global_step = state["step"]
        self._observer.resume(self.global_step)
        utils.log_rank_zero(log, f"Resumed after step {self.global_step}.")
        self._course.judge(self._observer.records)

    def train(self) -> None:
        """The paper's loop. Ctrl-C or SIGTERM ends it between two steps, or drops a rollout."""
        with (
            self.interrupts.handled(self._stop),
            self._observer.shown(done=self.global_step),
            self._profiler as profiler,
        ):
            if self._is_due(self.cfg.evaluation.every_n_steps):
                self._evaluate()
            while self.global_step < self.cfg.num_steps and not self._course.is_over:
                self.interrupts.boundary()
                metrics = StepMetrics()
                with metrics.timer("step_time"):
                    batches = self.generate_trajectory(self._next_prompts(), metrics)
                    with metrics.timer("time/update"):
                        old_logprobs = self._old_logprobs(batches)
                        for epoch in range(self.cfg.ppo_epochs):
                            for number, batch in enumerate(batches):
                                logprobs = self.grpo_step(batch, metrics, old_logprobs[number])
                                if epoch == number == 0:  # by the policy that sampled
                                    metrics.add_sampling_gap(batch.trajectory, logprobs)
                                    self._observer.trained(batch.trajectory, logprobs)
                                if old_logprobs[number] is None:
                                    old_logprobs[number] = logprobs
                self.global_step += 1
                profiler.step()
                self._log(metrics)
                if self._is_due(self.cfg.evaluation.every_n_steps):
                    self._evaluate()
                is_best = self._checkpoints.best == self.global_step
                if is_best or self._is_due(self.cfg.saving.every_n_steps):
                    self.save_checkpoint()

    def generate_trajectory(self, prompts: PromptBatch, metrics: StepMetrics) -> list[MiniBatch]:
        """All that the updates need, for each of the optimizer steps of an epoch.

        Args:
            prompts (PromptBatch): the step's B prompts.
            metrics (StepMetrics): receives the rollout's statistics.
        """
        trajectory = self._scored_rollout(prompts, metrics)  # N rows; forks may drop some
        with metrics.timer("time/logprobs"):
            return mini_batches(trajectory, self.cfg, loss=self._loss, reference=self._reference)

    def _old_logprobs(self, batches: list[MiniBatch]) -> list[Tensor | None]:
        """Of the policy that sampled, [N, L] each; None = the policy is still that one."""
        if self.cfg.objective.sampling_correction == "old_logprobs":
            return [batch.trajectory.sampler_logprobs for batch in batches]
        later = [batch.parts for batch in batches[1:]]
        temperature, model = self.cfg.temperature, self._model.eval()
        with torch.no_grad():
            return [None, *(trajectory_logprobs(model, p, temperature=temperature) for p in later)]

    def _scored_rollout(self, prompts: PromptBatch, metrics: StepMetrics) -> Trajectory:
        """Rolls out a group per prompt, scores it, and turns rewards into advantages: B*G rows."""
        self._model.eval()
        resampling = self._dynamic_sampling.begin(prompts, self._trainer_state)
        with metrics.timer("time/rollout"):
            trajectory = self._roll_out(prompts, resampling)
        kept = None if resampling is None else resampling.kept(trajectory)  # [B*G]
        with metrics.timer("time/reward"):
            scores = self._score(trajectory) if resampling is None else resampling.scores()
            advantages = self._advantages(scores, kept).to(self._device)  # [B*G]
        mask = trajectory.response_mask  # [B*G, L]
        if self.cfg.objective.mask_truncated_completions:
            mask = mask & ~trajectory.truncated[:, None]
        trajectory = replace(trajectory, advantages=advantages, response_mask=mask)
        metrics.add_rollout(trajectory, scores, group_size=self.cfg.grpo_samples)
        self._observer.scored(trajectory, scores)
        if resampling is None:
            return trajectory
        resampling.add_metrics(metrics, trajectory)
        return trajectory.select(kept)

    def grpo_step(
        self, batch: MiniBatch, metrics: StepMetrics, old_logprobs: Tensor | None
    ) -> Tensor:
        """One optimizer step, in micro-batches.

        Args:
            batch (MiniBatch): N rows, and which of them share a forward pass.
            metrics (StepMetrics): receives the loss's statistics.
            old_logprobs (Tensor | None): [N, L]; None = the policy is still the one that sampled.

        Returns:
            Tensor: [N, L] log-probs before the step.
        """
        trajectory, parts = batch.trajectory, batch.parts
        self._model.train()
        loss, seen = torch.zeros((), device=self._device), []
        for micro_batch in parts:
            part = trajectory.select(micro_batch.rows, numbers=micro_batch.numbers)
            logprobs, entropy = response_logprobs(
                self._model,
                micro_batch.layout,
                temperature=self.cfg.temperature,
                with_entropy=True,
                entropy_gradient=self._loss.needs_entropy_gradient,
            )  # [n, L]
            old = None if old_logprobs is None else old_logprobs[micro_batch.rows]
            output = self._loss_of(part, logprobs=logprobs, old=old, entropy=entropy)
            output.loss.backward()
            metrics.add_update(output, entropy=entropy, response_mask=part.response_mask)
            loss += output.loss.detach()
            seen.append(logprobs.detach())
        self._optimizer_step(loss, batch, metrics)
        return in_order(seen, parts)

    def _loss_of(
        self, part: Trajectory, *, logprobs: Tensor, old: Tensor | None, entropy: Tensor
    ) -> LossOutput:
        return self._loss(
            logprobs=logprobs,
            old_logprobs=old,
            ref_logprobs=part.ref_logprobs,
            advantages=part.advantages,
            weights=part.weights,
            response_mask=part.response_mask,
            entropy=entropy,
            corrections=importance_weights(
                trainer_logprobs=logprobs if old is None else old,
                behaviour_logprobs=part.behaviour_logprobs,
                response_mask=part.response_mask,
                mode=self.cfg.objective.sampling_correction,
                cap=self.cfg.objective.correction_cap,
            ),
        )

    def _optimizer_step(self, loss: Tensor, batch: MiniBatch, metrics: StepMetrics) -> None:
        """Sums the ranks' gradients, and takes the step if they and the loss are finite."""
        parallel.reduce_gradients(self._model)
        grad_norm = total_grad_norm(self._model.parameters())
        if batch.num_tokens > 0 and self._guard.allows_step(
            loss=loss,
            grad_norm=grad_norm,
            model=self._model,
            trajectory=batch.trajectory,
            step=self.global_step + 1,
        ):
            if self.cfg.clip_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(
                    self._model.parameters(), self.cfg.clip_grad_norm, grad_norm
                )
            optimizer_step(self._optimizer)
        metrics.add_sum("loss", loss, 1 / parallel.world_size())
        metrics.add_max("grad_norm", grad_norm)
        metrics.add_max("learning_rate", float(self._optimizer.param_groups[0]["lr"]))
        metrics.add_max("nonfinite_steps", self._guard.skipped)
        self._optimizer.zero_grad(set_to_none=True)
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()

    def _next_prompts(self) -> PromptBatch:
        count = self.cfg.batch_size * parallel.world_size()
        rounds = range(1, self.cfg.dynamic_sampling.max_resamples + 1)
        return prompts_of_rank(
            self._dataset,
            self._sampler.next(count),
            spare=[row for n in rounds for row in self._sampler.next(count, skip=n * count)],
            rank=parallel.rank(),
            world_size=parallel.world_size(),
        )

    def _roll_out(self, prompts: PromptBatch, resampling: Resampling | None) -> Trajectory:
        return roll_out(
            self._engine,
            prompts,
            tokenizer=self._tokenizer,
            group_size=self.cfg.grpo_samples,
            params=self.cfg.sampling_params,
            prefill=self._dataset.prefill,
            seed=self.seed,
            step=self.global_step,
            report=self._observer.rollout,
            admission=resampling,
        )

    def _score(self, trajectory: Trajectory) -> RewardScores:
        return self._rewards(
            prompts=trajectory.prompts,
            completions=trajectory.completions,
            columns=trajectory.columns,
            group_size=self.cfg.grpo_samples,
            completion_ids=trajectory.completion_ids,
            trainer_state=self._trainer_state,
        )

    def _advantages(self, scores: RewardScores, kept: Tensor | None) -> Tensor:
        return reward_advantages(
            scores.total,
            scores.scores,
            scores.weights,
            group_size=self.cfg.grpo_samples,
            normalization=self.cfg.objective.advantage,
            aggregation=self.cfg.objective.multi_objective_aggregation,
            kept=kept,
        )

    @property
    def _trainer_state(self) -> TrainerState:
        steps = self.cfg.num_steps
        return TrainerState(self.global_step, max_steps=steps, epoch=self._sampler.epoch)

    def _is_due(self, every: int | None) -> bool:
        is_end = self._course.is_over or self.global_step in (0, self.cfg.num_steps)
        return is_end or (every is not None and self.global_step % every == 0)

    def _log(self, metrics: StepMetrics) -> None:
        values = metrics.compute() | self._sampler.metrics
        if self._device.type == "cuda":
            values |= training.get_memory_stats(device=self._device)
        seen = self._observer.step(self.global_step, values)
        self._sampler.learn(seen["prompt_index"], seen["pass_rate"])

    def _evaluate(self) -> None:
        """Unless a run that is resumed already has."""
        if self._evaluator is None or self._observer.has_evaluation(self.global_step):
            return
        self.interrupts.boundary()
        self._model.eval()
        evaluation = self._evaluator(self._engine, state=self._trainer_state)
        self._observer.evaluation(self.global_step, evaluation)
        self._course.judge(self._observer.records)

    def save_checkpoint(self) -> None:
        """Writes the policy and all that a resumed run needs to ``output_dir/step_<n>``."""
        state = {
            "step": self.global_step,
            "optimizer": optimizer_state(self._optimizer),
            "guard": self._guard.state_dict(),
            "sampler": self._sampler.state_dict(),
            "torch_rng": parallel.random_states(self._device),
        }
        folder = self._checkpoints.save(self._model, state, step=self.global_step)
        utils.log_rank_zero(log, f"Saved {folder}")

    def _stop(self) -> None:
        """After a signal: saves what is done, and says how to go on."""
        if self.global_step != self._checkpoints.last_step:
            self.save_checkpoint()
        utils.log_rank_zero(log, self._checkpoints.how_to_resume())

    def cleanup(self) -> None:
        """Ends what runs beside the recipe: reward processes, loggers, the process group."""
        self._rewards.close()
        self._observer.close()
        parallel.end_process_group()


@parse
def recipe_main(cfg: DictConfig) -> int:
    """Entry point: keys come from the config file, then from ``key=value`` on the command line."""
    exit_on_signals()
    recipe = GRPOFullFinetuneRecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()
    return recipe.interrupts.exit_code


if __name__ == "__main__":
    sys.exit(recipe_main())
