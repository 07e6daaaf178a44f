"""GRPO: reinforcement learning from verifiable rewards, as in the paper.

    for each step:
        sample a group of completions for each prompt, and score them with the rewards
        advantage of a completion = its reward, centred and scaled within its group
        ppo_epochs times, in num_minibatches parts of the groups: an optimizer step on the
            clipped surrogate + KL to the reference

Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), algorithm 1. Departures: the reference is
the initial policy throughout (one outer iteration).

It runs on one device or, under torchrun, on many, where every rank rolls out, scores and trains on
its own prompts. The loss's denominator covers all ranks, so the same prompts give the same step on
any number of ranks.

Shapes: B prompts of this rank, G samples in a group, N = B*G rows, T prompt + response, L response.
"""

import sys
from dataclasses import replace

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune.recipe_interfaces import FTRecipeInterface

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.cli.entry import parse
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.loss import LossOutput
from torchtune_grpo.machine.parallel import world_size
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.rollout import sample_groups
from torchtune_grpo.run import Run
from torchtune_grpo.steps import Steps
from torchtune_grpo.training import importance_weights, in_order, response_logprobs
from torchtune_grpo.training.mini_batches import MiniBatch, mini_batches
from torchtune_grpo.trajectory import Trajectory


class GRPOFullFinetuneRecipe(FTRecipeInterface):
    """GRPO for LoRA, QLoRA, DoRA and full fine-tuning, on one device or under torchrun.

    With adapters, the reference policy is the model with its adapters switched off. Full
    fine-tuning keeps a copy; ``loss.kl_coeff: 0`` needs none.

    On several ranks, ``distributed.sharding`` says whether each holds the whole model (only
    gradients cross the wire) or a part of it (FSDP2). ``batch_size`` and ``forward_batch_size`` are
    per rank.
    """

    def __init__(self, cfg: DictConfig, run: Run | None = None) -> None:
        self.run = run or Run(cfg)

    def setup(self, cfg: DictConfig) -> None:
        """Build everything; mistakes in the config are reported before weights are read."""
        self.parts = self.run.build()
        self.cfg, self.model = self.parts.cfg, self.parts.policy
        self.steps = Steps(self.run, self.parts)

    def train(self) -> None:
        """Run the paper's loop. Ctrl-C or SIGTERM ends it between steps, or drops a rollout."""
        steps = self.steps
        with steps.running(save=self.save_checkpoint):
            if steps.is_evaluation_due:  # of the policy before training
                self.evaluate()
            for step in steps:
                rows = self.rollout(step)  # [B*G], scored and compared; forks may drop some
                for batch in self.mini_batches(rows, step) * self.cfg.ppo_epochs:
                    with step.timer("time/update"):
                        self.update(batch, step)
                steps.finish(step)
                if steps.is_evaluation_due:
                    self.evaluate()
                if steps.is_checkpoint_due:
                    self.save_checkpoint()

    def rollout(self, step: StepMetrics) -> Trajectory:
        """Roll out a group for each prompt, score it, and turn rewards into advantages.

        Dynamic sampling does so in rounds, and returns only the groups that pass its filter.
        """
        self.model.eval()
        rounds = self.run.rounds()
        for prompts in rounds:
            with step.timer("time/rollout"):
                rows = self.sample(prompts)
            with step.timer("time/reward"):
                rounds.add(rows, self.score(rows))
        rows, scores, kept = rounds.result()
        advantages = self.advantages(scores, kept).to(rows.tokens.device)  # [N]
        mask = rows.response_mask  # [N, L]
        if self.cfg.objective.mask_truncated_completions:
            mask = mask & ~rows.truncated[:, None]
        rows = replace(rows, advantages=advantages, response_mask=mask)
        step.add_rollout(rows, scores, group_size=self.cfg.grpo_samples)
        step.add_numbers(rounds.metrics())
        self.run.recorder.groups.rollout(rows, scores)
        return rows.select(kept)

    def sample(self, prompts: PromptBatch) -> Trajectory:
        """Sample a group of responses for each prompt: [B*G] rows."""
        return sample_groups(
            self.parts.engine,
            prompts,
            tokenizer=self.run.tokenizer,
            group_size=self.cfg.grpo_samples,
            params=self.cfg.sampling_params,
            prefill=self.run.dataset.prefill,
            seed=self.cfg.seed,
            step=self.steps.done,
            environment=self.run.environment,
            report=self.run.recorder.progress,
        )

    def score(self, rows: Trajectory) -> RewardScores:
        """Score each row with the rewards."""
        return self.run.rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            group_size=self.cfg.grpo_samples,
            completion_ids=rows.completion_ids,
            trainer_state=self.steps.trainer_state,
        )

    def advantages(self, scores: RewardScores, kept: Tensor) -> Tensor:
        """Compare each reward with those of its group: [N]; 0 for rows that are not kept."""
        size, gate = self.cfg.grpo_samples, self.run.outcome_gate
        if gate is not None:
            kept = kept & gate(scores.of(gate.reward), group_size=size)
        return reward_advantages(
            scores.total,
            scores.scores,
            scores.weights,
            group_size=size,
            normalization=self.cfg.objective.advantage,
            aggregation=self.cfg.objective.multi_objective_aggregation,
            kept=kept,
        )

    def mini_batches(self, rows: Trajectory, step: StepMetrics) -> list[MiniBatch]:
        """Deal out the groups to an epoch's optimizer steps, with all log-probs that they need."""
        with step.timer("time/logprobs"):
            return mini_batches(rows, self.parts)

    def update(self, batch: MiniBatch, step: StepMetrics) -> None:
        """Take one optimizer step, in micro-batches."""
        self.model.train()
        loss, seen = torch.zeros((), device=self.run.device), []
        for micro_batch in batch.micro_batches:
            part = batch.trajectory.select(micro_batch.rows, on_host=micro_batch.rows_on_host)
            logprobs, entropy = response_logprobs(
                self.model,
                micro_batch.layout,
                temperature=self.cfg.temperature,
                entropy="gradient" if self.parts.loss.needs_entropy_gradient else "value",
            )  # [n, L]
            old = batch.old_logprobs
            old = None if old is None else old[micro_batch.rows]
            output = self.loss_of(part, logprobs=logprobs, old=old, entropy=entropy)
            output.loss.backward()
            step.add_update(output, entropy=entropy, response_mask=part.response_mask)
            loss += output.loss.detach()
            seen.append(logprobs.detach())
        taken = self.parts.optimizer.step(
            loss, num_tokens=batch.num_tokens, step=self.steps.done + 1
        )
        step.add_sum("loss", loss, 1 / world_size())
        step.add_numbers(taken)
        step.updates += 1
        found = in_order(seen, batch.micro_batches)  # [N, L], before the step
        if batch.old_logprobs is None:  # the policy was the one that sampled
            batch.old_logprobs = found
        if step.updates == 1:
            step.add_sampling_gap(batch.trajectory, found)
            self.run.recorder.groups.update(batch.trajectory, found)

    def loss_of(
        self, part: Trajectory, *, logprobs: Tensor, old: Tensor | None, entropy: Tensor
    ) -> LossOutput:
        """Compute the share of a micro-batch's n rows in the step's loss; tensors are [n, L]."""
        assert part.weights is not None and part.advantages is not None
        return self.parts.loss(
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

    def evaluate(self) -> None:
        """Measure the policy on the held-out prompts."""
        self.model.eval()
        self.steps.evaluate()

    def save_checkpoint(self) -> None:
        """Write the policy and all that a resumed run needs to ``output_dir/step_<n>``."""
        self.steps.save()

    def cleanup(self) -> None:
        """End what runs beside the recipe: reward processes, loggers, the process group."""
        self.run.close(leave_ranks=True)


@parse
def recipe_main(cfg: DictConfig) -> int:
    """Entry point: keys come from the config file, then from ``key=value`` on the command line."""
    recipe = GRPOFullFinetuneRecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()
    return recipe.run.interrupts.exit_code


if __name__ == "__main__":
    sys.exit(recipe_main())
