"""GRPO on one device: reinforcement learning from verifiable rewards, as in the paper.

    for each step:
        sample a group of completions for each prompt, and score them with the rewards
        advantage of a completion = its reward, centred and scaled within its group
        ppo_epochs times: one optimizer step on the clipped surrogate + KL to the reference

Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), algorithm 1. Departures: the reference is
the initial policy throughout (one outer iteration), and each step of ``ppo_epochs`` uses all of the
step's samples at once.

Shapes: B prompts, G samples in a group, N = B*G rows, T prompt + response, L response.
"""

import sys
from pathlib import Path

import torch
from omegaconf import DictConfig
from torchtune import config, modules, training, utils
from torchtune.recipe_interfaces import FTRecipeInterface
from tqdm import tqdm

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.checkpoint import (
    find_checkpoint,
    load_training_state,
    make_checkpointer,
    restore_weights,
    save_checkpoint,
    set_aside_previous_run,
)
from torchtune_grpo.checkpoint._whole_state import load_optimizer_state, optimizer_state
from torchtune_grpo.config import read_config
from torchtune_grpo.data import PromptBatch, RLDataset, collate_prompts, step_indices
from torchtune_grpo.evaluation import Evaluator
from torchtune_grpo.importance import importance_weights
from torchtune_grpo.logprobs import in_order, response_logprobs
from torchtune_grpo.logprobs._micro_batches import MicroBatch, micro_batches
from torchtune_grpo.memory import keep_freed_memory
from torchtune_grpo.metrics import RunLog, StepMetrics, make_metric_logger
from torchtune_grpo.nonfinite import NonFiniteGuard, total_grad_norm
from torchtune_grpo.parallel import (
    on_first_rank,
    random_states,
    rank,
    reduce_gradients,
    restore_random_state,
    sum_over_ranks,
    sync_with_last,
    world_size,
)
from torchtune_grpo.policy import build_policy
from torchtune_grpo.read_config import (
    check_checkpoint_files,
    check_context,
    check_token_budget,
)
from torchtune_grpo.reference import make_reference
from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.rollout import Progress, make_engine, roll_out
from torchtune_grpo.trajectory import Trajectory

log = utils.get_logger("INFO")


class GRPOFullFinetuneRecipeSingleDevice(FTRecipeInterface):
    """GRPO on one device, for LoRA, QLoRA, DoRA and full fine-tuning, whatever ``model`` names.

    With adapters the reference policy is the model with its adapters switched off. Full fine-tuning
    keeps a frozen copy. ``loss.kl_coeff: 0`` keeps and computes no reference.

    Args:
        cfg (DictConfig): the config; ``python -m torchtune_grpo.config`` lists its keys.

    Raises:
        ValueError: naming the config key, the value and the remedy.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = read_config(cfg)
        self._device = utils.get_device(device=self.cfg.device)
        if self._device.type == "cpu":
            keep_freed_memory()
        self._output_dir = Path(self.cfg.output_dir)
        self.seed = training.set_seed(seed=self.cfg.seed)
        self.global_step = 0

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; what can be wrong with the config fails before weights are read."""
        on_first_rank(config.instantiate, self.cfg.prepare)
        check_checkpoint_files(self.cfg)
        if self.cfg.resume_from_checkpoint:
            checkpoint = find_checkpoint(self._output_dir)
        else:
            on_first_rank(set_aside_previous_run, self._output_dir)
        self._tokenizer = config.instantiate(self.cfg.tokenizer)
        self._rewards = RewardSet.from_config(
            self.cfg.rewards, max_failure_share=self.cfg.max_reward_failure_share
        )
        self._loss = config.instantiate(self.cfg.loss)
        self._dataset, self._evaluator = self._setup_data()

        self._metric_logger = make_metric_logger(self.cfg.metric_logger)
        self._metric_logger.log_config(cfg)
        self._run_log = RunLog(self._output_dir, num_completions=self.cfg.log_completions)
        self._guard = NonFiniteGuard(self._output_dir, max_steps=self.cfg.max_nonfinite_steps)
        self._profiler = self._setup_profiler()

        self._checkpointer = make_checkpointer(self.cfg.checkpointer, output_dir=self._output_dir)
        self._model = build_policy(
            self.cfg,
            self._checkpointer.load_checkpoint()[training.MODEL_KEY],
            device=self._device,
        )
        self._engine = make_engine(
            self._model,
            self.cfg.rollout,
            max_rows=self.cfg.max_rollout_rows,
        )
        self._reference = self._setup_reference()
        self._optimizer = config.instantiate(
            self.cfg.optimizer, [p for p in self._model.parameters() if p.requires_grad]
        )
        self._lr_scheduler = config.instantiate(
            self.cfg.lr_scheduler,
            self._optimizer,
            num_training_steps=self.cfg.num_steps * self.cfg.ppo_epochs,
        )
        if self.cfg.resume_from_checkpoint:
            self._resume(checkpoint)
        self._setup_passes()

    def _setup_data(self):
        """Tokenizes all prompts, and checks that they fit the model, before it is loaded."""
        dataset = config.instantiate(self.cfg.dataset, self._tokenizer)
        self._rewards.check(dataset[0]["columns"])
        lengths = {"dataset": dataset.max_prompt_length}
        evaluator = None
        if self.cfg.eval_dataset is not None:
            held_out = config.instantiate(self.cfg.eval_dataset, self._tokenizer)
            lengths["eval_dataset"] = held_out.max_prompt_length
            evaluator = Evaluator(
                dataset=held_out,
                tokenizer=self._tokenizer,
                rewards=self._rewards,
                accuracy_reward=self.cfg.eval_reward,
                params=self.cfg.sampling,
                num_samples=self.cfg.eval_samples,
                seed=self.seed,
            )
        check_context(self.cfg, prompt_lengths=lengths)
        check_token_budget(self.cfg, longest_prompt=dataset.max_prompt_length)
        self._step_rows(dataset, step=0)  # fails if there are too few prompts
        return dataset, evaluator

    def _setup_reference(self):
        if not self._loss.needs_reference:
            return None
        dtype = self.cfg.reference_dtype or self.cfg.dtype
        return make_reference(
            self._model,
            dtype=training.get_dtype(dtype, device=self._device),
            device=torch.device(self.cfg.reference_device or self._device),
        )

    def _setup_passes(self) -> None:
        """Compiles and checkpoints the layers, after all that copies or loads weights."""
        if self.cfg.compile:
            training.compile_model(self._model, verbose=False)
        if self.cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(
                self._model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
            )

    def _setup_profiler(self):
        if self.cfg.profiler is None:
            return training.DummyProfiler()
        profiler, _ = config.instantiate(self.cfg.profiler)
        return profiler

    def _resume(self, checkpoint: Path) -> None:
        state = load_training_state(checkpoint, seed=self.seed)
        restore_weights(
            self._model,
            state,
            checkpoint,
            cfg=self.cfg.checkpointer,
            output_dir=self._output_dir,
        )
        load_optimizer_state(self._optimizer, state["optimizer"])
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(state["lr_scheduler"])
        restore_random_state(state["torch_rng"])
        self.global_step = state["step"]
        self._run_log.keep_until(self.global_step)
        log.info(f"Resumed from {checkpoint} after step {self.global_step}.")

    def generate_trajectory(
        self, prompts: PromptBatch, metrics: StepMetrics
    ) -> tuple[Trajectory, list[MicroBatch]]:
        """Rolls out a group per prompt, scores it, and turns rewards into advantages.

        Args:
            prompts (PromptBatch): the step's prompts.
            metrics (StepMetrics): receives the rollout's statistics.

        Returns:
            tuple[Trajectory, list[MicroBatch]]: N rows with the log-probs that the update needs,
            and how they are cut into forward passes.
        """
        self._model.eval()
        with metrics.timer("rollout"):
            trajectory = roll_out(
                self._engine,
                prompts,
                tokenizer=self._tokenizer,
                group_size=self.cfg.grpo_samples,
                params=self.cfg.sampling,
                prefill=self._dataset.prefill,
                seed=self.seed,
                step=self.global_step,
                report=self._show_rollout,
            )
        with metrics.timer("reward"):
            scores = self._rewards(
                prompts=trajectory.prompts,
                completions=trajectory.completions,
                columns=trajectory.columns,
                completion_ids=trajectory.completion_ids,
                trainer_state=self._trainer_state,
            )
            trajectory.advantages = reward_advantages(
                scores.scores,
                scores.weights,
                group_size=self.cfg.grpo_samples,
                normalization=self.cfg.advantage,
                objectives=self.cfg.objectives,
                failed=scores.failed,
            ).to(self._device)
        metrics.add_rollout(trajectory, scores, group_size=self.cfg.grpo_samples)
        self._run_log.completions(self.global_step + 1, trajectory, scores)
        if self.cfg.mask_truncated_completions:
            trajectory.response_mask &= ~trajectory.truncated[:, None]

        with metrics.timer("logprobs"):
            parts = micro_batches(
                trajectory,
                group_size=self.cfg.grpo_samples,
                pack=self.cfg.pack_groups,
                rows=self.cfg.rows_per_forward,
                token_budget=self.cfg.forward_token_budget,
                attention=self.cfg.attention,
            )
            if self.cfg.old_logprobs == "sampler":
                trajectory.old_logprobs = trajectory.sampler_logprobs
            if self._reference is not None:
                temperature = self.cfg.temperature
                trajectory.ref_logprobs = self._reference.logprobs(parts, temperature=temperature)
        return trajectory, parts

    def grpo_step(
        self, trajectory: Trajectory, parts: list[MicroBatch], metrics: StepMetrics, *, first: bool
    ) -> None:
        """One optimizer step on the whole trajectory, in micro-batches.

        Args:
            trajectory (Trajectory): N rows.
            parts (list[MicroBatch]): which rows share a forward pass.
            metrics (StepMetrics): receives the loss's statistics.
            first (bool): whether the policy is still the one that sampled the rows.
        """
        self._model.train()
        num_rows = sum_over_ranks(trajectory.num_rows)
        trajectory.weights = self._loss.weights(
            trajectory.response_mask,
            num_rows=num_rows,
            num_tokens=sum_over_ranks(int(trajectory.response_mask.sum())),
            max_generated_tokens=self.cfg.max_generated_tokens,
        )
        loss = torch.zeros((), device=self._device)
        known = []
        for micro_batch in sync_with_last(self._model, parts, defer=self.cfg.fsdp_defer_gradients):
            part = trajectory.select(micro_batch.rows)  # n rows
            logprobs, entropy = response_logprobs(
                self._model,
                micro_batch.layout,
                temperature=self.cfg.temperature,
                with_entropy=True,
                entropy_gradient=self._loss.needs_entropy_gradient,
            )  # [n, L]
            output = self._loss(
                logprobs=logprobs,
                old_logprobs=part.old_logprobs,
                ref_logprobs=part.ref_logprobs,
                advantages=part.advantages,
                weights=part.weights,
                response_mask=part.response_mask,
                entropy=entropy,
                corrections=importance_weights(
                    trainer_logprobs=logprobs if part.old_logprobs is None else part.old_logprobs,
                    sampler_logprobs=part.behaviour_logprobs,
                    response_mask=part.response_mask,
                    correction=self.cfg.sampling_correction,
                    cap=self.cfg.sampling_correction_cap,
                ),
            )
            output.loss.backward()
            loss += output.loss.detach()
            metrics.add_update(
                part,
                output,
                logprobs=logprobs.detach(),
                entropy=entropy.detach(),
                share=part.num_rows / num_rows,
                first=first,
            )
            known.append(logprobs.detach())
        if trajectory.old_logprobs is None:  # for the next of ppo_epochs
            trajectory.old_logprobs = in_order(known, parts)
        reduce_gradients(self._model)
        grad_norm = total_grad_norm(self._model.parameters())
        metrics.add_max("grad_norm", grad_norm.item())
        metrics.add_max("lr", float(self._optimizer.param_groups[0]["lr"]))
        if self._guard.allows_step(
            loss=loss,
            grad_norm=grad_norm,
            model=self._model,
            trajectory=trajectory,
            step=self.global_step + 1,
        ):
            if self.cfg.clip_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(
                    self._model.parameters(), self.cfg.clip_grad_norm, grad_norm
                )
            self._optimizer.step()
        metrics.add_max("nonfinite_steps", self._guard.skipped)
        self._optimizer.zero_grad(set_to_none=True)
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()

    def train(self) -> None:
        """The paper's loop."""
        if self.global_step == 0:
            self._evaluate()
        self._progress = tqdm(
            total=self.cfg.num_steps, initial=self.global_step, desc="GRPO", disable=rank() > 0
        )
        with self._profiler as profiler:
            while self.global_step < self.cfg.num_steps:
                metrics = StepMetrics()
                with metrics.timer("step"):
                    trajectory, parts = self.generate_trajectory(self._next_prompts(), metrics)
                    with metrics.timer("update"):
                        for epoch in range(self.cfg.ppo_epochs):
                            self.grpo_step(trajectory, parts, metrics, first=epoch == 0)
                self.global_step += 1
                profiler.step()
                values = metrics.compute()
                self._log(values)
                self._progress.update()
                self._progress.set_postfix(reward=f"{values['reward']:.3f}")

                last = self.global_step == self.cfg.num_steps
                if last or _is_due(self.global_step, self.cfg.eval_every_n_steps):
                    self._evaluate()
                if last or _is_due(self.global_step, self.cfg.save_every_n_steps):
                    self.save_checkpoint()
        self._progress.close()

    @property
    def _trainer_state(self) -> TrainerState:
        return TrainerState(global_step=self.global_step, max_steps=self.cfg.num_steps)

    def _step_rows(self, dataset: RLDataset, *, step: int) -> list[int]:
        return step_indices(
            step=step,
            prompts_per_step=self.cfg.prompts_per_step,
            dataset_size=len(dataset),
            seed=self.seed,
            rank=rank(),
            world_size=world_size(),
        )

    def _next_prompts(self) -> PromptBatch:
        rows = self._step_rows(self._dataset, step=self.global_step)
        items = [self._dataset[row] for row in rows]
        return collate_prompts(items, pad_id=self._tokenizer.pad_id).to(self._device)

    def _show_rollout(self, progress: Progress) -> None:
        self._progress.set_postfix_str(f"rollout {progress}")

    def _log(self, values: dict[str, float]) -> None:
        if self.cfg.log_peak_memory_stats and self._device.type != "cpu":
            values |= training.get_memory_stats(device=self._device)
        self._run_log.metrics(self.global_step, values)
        if _is_due(self.global_step, self.cfg.log_every_n_steps):
            self._metric_logger.log_dict(values, step=self.global_step)

    def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        self._model.eval()
        values = self._evaluator(self._engine, device=self._device, state=self._trainer_state)
        self._run_log.metrics(self.global_step, values)
        self._metric_logger.log_dict(values, step=self.global_step)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        utils.log_rank_zero(log, f"Step {self.global_step}: {shown}")

    def save_checkpoint(self) -> None:
        """Writes the policy and all that a resumed run needs to ``output_dir/step_<n>``."""
        scheduler = self._lr_scheduler
        state = {
            "step": self.global_step,
            "seed": self.seed,
            "optimizer": optimizer_state(self._optimizer),
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            "torch_rng": random_states(),
        }
        folder = save_checkpoint(
            checkpointer=self._checkpointer,
            cfg=self.cfg.checkpointer,
            output_dir=self._output_dir,
            step=self.global_step,
            model=self._model,
            training_state=state,
            adapter_only=self.cfg.save_adapter_weights_only,
            keep_last=self.cfg.keep_last_n_checkpoints,
        )
        utils.log_rank_zero(log, f"Saved {folder}")

    def cleanup(self) -> None:
        """Ends what runs beside the recipe: reward processes, loggers."""
        self._rewards.close()
        self._metric_logger.close()


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: keys come from the config file, then from ``key=value`` on the command line."""
    config.log_config(recipe_name="GRPOFullFinetuneRecipeSingleDevice", cfg=cfg)
    recipe = GRPOFullFinetuneRecipeSingleDevice(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
