"""A run: everything that a config describes, each part made when it is first used.

The recipe, the Python API and the commands share it, and so does the check of a config, which makes
everything but the weights.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import config, modules, training, utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.advantages import OutcomeGate
from torchtune_grpo.checkpoint.checkpoints import Checkpoints, check_state
from torchtune_grpo.checkpoint.folder import (
    checkpoint_folder,
    claim_output_dir,
    set_aside_previous_run,
    write_error,
)
from torchtune_grpo.checkpoint.resume import optimizer_state, restore_optimizer
from torchtune_grpo.config.check import instantiate, read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig, SamplingParams
from torchtune_grpo.config.text import Problems, end_on_ctrl_c, errors_in_one_line
from torchtune_grpo.data.dataset import collate_prompts
from torchtune_grpo.data.samplers import make_sampler
from torchtune_grpo.evaluation.evaluator import Evaluator
from torchtune_grpo.evaluation.statistics import best_step, should_stop
from torchtune_grpo.loss import Loss, make_loss
from torchtune_grpo.machine import interrupt, parallel
from torchtune_grpo.machine.device import (
    choose_threads,
    find_device,
    keep_freed_memory,
    only_warnings,
    seed_step,
)
from torchtune_grpo.machine.interrupt import Interrupts
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.monitor.recorder import Recorder
from torchtune_grpo.rewards import Reward, RewardSet, TrainerState
from torchtune_grpo.rollout import roll_out
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import RolloutEngine
from torchtune_grpo.training.dynamic_sampling import Rounds
from torchtune_grpo.training.optimizer import PolicyOptimizer
from torchtune_grpo.training.packing import compile_layers
from torchtune_grpo.training.policy import (
    Reference,
    check_model,
    check_prompts,
    empty_model,
    load_policy,
    longest_prompt,
    make_policy,
    make_reference,
    should_shard,
)
from torchtune_grpo.trajectory import Trajectory

log = utils.get_logger("INFO")


class Run:
    """A config and the parts made from it; raises a ConfigError with all mistakes in the config.

    ``table`` is a subclass of the table of keys if a recipe has keys of its own. From Python,
    ``data`` holds rows by the key of their data set, and ``rewards`` holds rewards that no config
    can name, by their place in the config's list.
    """

    def __init__(
        self,
        cfg: DictConfig,
        table: type[GRPOConfig] = GRPOConfig,
        *,
        data: Mapping[str, Any] | None = None,
        rewards: Mapping[int, Reward] | None = None,
    ) -> None:
        self.given, self.cfg = cfg, read_config(cfg, table)
        self._rows, self._rewards = data or {}, rewards or {}
        self.step = 0  # finished steps
        self._is_stopped = False  # by an evaluation
        self._optimizer: PolicyOptimizer | None = None
        self.interrupts = Interrupts()

    # --- Before weights are read -----------------------------------------------------------------

    @cached_property
    def device(self) -> torch.device:
        """This rank's device; asking for it joins the ranks that torchrun has started."""
        device = find_device(self.cfg.device)
        parallel.init_process_group(device)
        return device

    @cached_property
    def tokenizer(self) -> Any:
        return instantiate("tokenizer", self.cfg.tokenizer)

    @cached_property
    def empty_model(self) -> TransformerDecoder:
        """The config's model on the meta device, for its shapes alone."""
        return empty_model(self.cfg)

    @cached_property
    def rewards(self) -> RewardSet:
        rewards = [self._rewards.get(i, node) for i, node in enumerate(self.cfg.rewards)]
        share = self.cfg.max_reward_failure_share
        return RewardSet.from_config(rewards, max_failure_share=share)

    @property
    def decider(self) -> str:
        """The reward that says what is right."""
        return self.rewards.decider(self.cfg.evaluation.reward)

    @cached_property
    def outcome_gate(self) -> OutcomeGate | None:
        """The gate that keeps shaping rewards from training alone, if wanted and any exist."""
        rewards, wanted = self.rewards.rewards, self.cfg.objective.outcome_gate
        known = (reward.name for reward in rewards if reward.decides and reward.weight)
        name = self.cfg.evaluation.reward or next(known, None)
        others = [reward.name for reward in rewards if reward.name != name and reward.weight]
        if wanted and name not in self.rewards.names:
            raise ValueError(
                "objective.outcome_gate=True: no reward is known to decide; name it in "
                "evaluation.reward."
            )
        if wanted is False or name not in self.rewards.names or not others:
            return None
        utils.log_rank_zero(
            log,
            f"{', '.join(others)}: only train groups in which {name} differs, once it has "
            "(objective.outcome_gate).",
        )
        return OutcomeGate(name)

    @cached_property
    def loss(self) -> Loss:
        return make_loss(self.cfg.loss)

    @cached_property
    def dataset(self) -> Any:
        """The prompts to train on."""
        return self.load_dataset("dataset")

    @cached_property
    def eval_dataset(self) -> Any:
        """The held-out prompts, if there are any."""
        return None if self.cfg.eval_dataset is None else self.load_dataset("eval_dataset")

    def load_dataset(self, key: str) -> Any:
        """Load the data set of a key, and check it against the rewards and the model."""
        rows = {"rows": self._rows[key]} if key in self._rows else {}
        dataset = instantiate(key, getattr(self.cfg, key), self.tokenizer, **rows)
        self.check_dataset(dataset, key)
        return dataset

    def check_dataset(self, dataset: Any, key: str) -> None:
        """Check that rewards can score answers to its rows, and that its prompts fit the model."""
        self.rewards.check_data(dataset, key=key)
        check_prompts(self.cfg, key, dataset.checked_prompts, model=self.empty_model)
        if hasattr(dataset, "check_unread"):
            longest = longest_prompt(self.cfg, model=self.empty_model)
            dataset.check_unread(max_tokens=longest, fault=self.rewards.fault_of)

    @cached_property
    def sampler(self) -> Any:
        """The sampler, which decides which prompts come next."""
        make = functools.partial(make_sampler, self.cfg.sampler, self.dataset, seed=self.cfg.seed)
        tried = make()
        rows = tried.next(self.cfg.batch_size * parallel.world_size())  # fails if there are too few
        tried.learn(rows, [0.5] * len(rows))
        check_state("sampler", tried.state_dict())
        return make()

    @cached_property
    def evaluator(self) -> Evaluator | None:
        """The evaluator of policies on the held-out prompts, if there are any."""
        if self.eval_dataset is None:
            return None
        return self.make_evaluator(self.eval_dataset)

    def items_of(self, prompts: Sequence[Any]) -> list[dict[str, Any]]:
        """Turn prompts from outside the data set into items like its own."""
        items = [
            {"index": i, "tokens": self.dataset.encode(prompt), "prompt": prompt, "columns": {}}
            for i, prompt in enumerate(prompts)
        ]
        tokens = [item["tokens"] for item in items]
        check_prompts(self.cfg, "prompts", tokens, model=self.empty_model)
        return items

    def answer(
        self,
        engine: RolloutEngine,
        items: Sequence[dict[str, Any]],
        *,
        group_size: int,
        params: SamplingParams,
        seed: int,
    ) -> Trajectory:
        """Sample a group of responses for each item, outside of training: [B*G] rows."""
        return roll_out(
            engine,
            collate_prompts(items),
            tokenizer=self.tokenizer,
            group_size=group_size,
            params=params,
            prefill=self.dataset.prefill,
            seed=seed,
            step=0,
        )

    def make_evaluator(self, dataset: Any) -> Evaluator:
        """Make an evaluator for a data set that works like the run's own."""
        return Evaluator(self.cfg, dataset, tokenizer=self.tokenizer, rewards=self.rewards)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints, and the model that it starts from."""
        return Checkpoints(self.cfg)

    @cached_property
    def recorder(self) -> Recorder:
        return Recorder(
            self.cfg,
            self.given,
            rewards=self.rewards.names,
            decider=self.decider,
            measure=self.rewards.measure(self.cfg.evaluation.reward),
            stop_tokens=self.tokenizer.stop_tokens,
            device=self.device,
        )

    @cached_property
    def profiler(self) -> Any:
        """The config's profiler, or one that does nothing."""
        node = self.cfg.profiler
        if node is None or node.get("enabled") is False:
            return training.DummyProfiler()
        return instantiate("profiler", node)[0]

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the model is spread over the ranks."""
        return should_shard(self.cfg, device=self.device)

    def check(self, *, read_data: bool = True) -> tuple[list[str], list[str]]:
        """Make all that needs no weights; return mistakes, and remarks on what is not checked."""
        problems, remarks = Problems(), Problems()
        with remarks.noted():
            find_device(self.cfg.device)
        for part in ("loss", "outcome_gate"):  # the gate makes the rewards
            with problems.noted():
                getattr(self, part)
        if self.cfg.prepare and not Path(self.cfg.checkpointer.checkpoint_dir).exists():
            remarks.append("prepare: makes the checkpoint when a run starts; it is not checked.")
            return problems, remarks
        with problems.noted():
            check_model(self.cfg)
            _ = self.tokenizer
        if read_data and not problems:
            for part in ("dataset", "eval_dataset", "sampler", "evaluator"):
                with problems.noted():
                    getattr(self, part)
        return list(dict.fromkeys(problems)), remarks

    def join(self) -> None:
        """Join the other ranks, prepare the model's folder and check it."""
        is_cpu = self.device.type == "cpu"
        parallel.on_first_rank(config.instantiate, self.cfg.prepare)
        check_model(self.cfg)
        if is_cpu:
            keep_freed_memory()
            choose_threads(self.empty_model)

    def start(self) -> Path | None:
        """Claim ``output_dir`` and make all that needs no weights, so that mistakes surface here.

        Returns the checkpoint to resume from, if the config says so.
        """
        _ = self.device, self.loss, self.outcome_gate
        parallel.on_first_rank(claim_output_dir, Path(self.cfg.output_dir))
        with only_warnings():
            training.set_seed(seed=self.cfg.seed)
        self.join()
        if self.device.type == "cpu":
            utils.log_rank_zero(log, f"CPU threads: {torch.get_num_threads()}.")
        checkpoint = None
        if self.cfg.resume_from_checkpoint:
            checkpoint = parallel.on_first_rank(self.checkpoints.to_resume)
        for part in ("is_sharded", "checkpoints", "dataset", "evaluator", "sampler"):
            getattr(self, part)
        if checkpoint is None:
            parallel.on_first_rank(set_aside_previous_run, self.cfg)
        _ = self.recorder
        return checkpoint

    # --- The policy ------------------------------------------------------------------------------

    def build_policy(self) -> TransformerDecoder:
        """Build the policy with the weights that training starts from, the same on all ranks.

        A policy to be sharded has them on the first rank, and is on meta on the others.
        """
        device = self.device
        if self.is_sharded:  # too large for a device, or the host has no memory for one per rank
            device = torch.device("cpu" if parallel.rank() == 0 else "meta")
        model = make_policy(self.cfg, device=device)
        parallel.load_once(
            model, lambda: load_policy(model, self.cfg, self.checkpoints.base_weights())
        )
        if not self.is_sharded:
            parallel.broadcast_trained_parameters(model)
        return model

    def build_reference(self, policy: TransformerDecoder) -> Reference | None:
        """Return the policy as it is now, as the loss's reference; None if the loss needs none."""
        return make_reference(policy, self.cfg) if self.loss.needs_reference else None

    def make_engine(self, policy: TransformerDecoder) -> RolloutEngine:
        """Make the engine that generates responses with the policy's current weights."""
        return make_engine(
            policy,
            self.cfg.rollout,
            is_sharded=self.is_sharded,
            device=self.device,
            bytes_to_come=self._bytes_to_come,
        )

    def _bytes_to_come(self) -> int:
        """Return the bytes of device memory that training will still take, if there is any."""
        return 0 if self._optimizer is None else self._optimizer.bytes_to_come(self.device)

    def load_engine(self, checkpoint: Path | None) -> RolloutEngine:
        """Make the engine with a checkpoint's weights; None = the weights before training."""
        start = " with ".join(
            filter(None, [self.cfg.checkpointer.checkpoint_dir, self.cfg.adapter_dir])
        )
        if parallel.rank() == 0:
            print(f"Weights: {checkpoint or start}")
        if checkpoint is not None:
            self.checkpoints.check_policy(checkpoint)
        model = self.build_policy()
        if checkpoint is not None:
            self.checkpoints.restore(model, checkpoint)
        engine = self.make_engine(model.eval())
        if self.is_sharded:
            parallel.shard(model, self.cfg.distributed, device=self.device)
        return engine

    def newest_checkpoint(self) -> Path | None:
        """The run's newest checkpoint; None before the first one."""
        with suppress(ValueError):
            return self.checkpoints.newest()
        return None

    def prepare_passes(self, policy: TransformerDecoder, reference: Reference | None) -> None:
        """Compile, checkpoint and shard the layers, after all copying and loading of weights."""
        if self.cfg.compile:
            utils.log_rank_zero(log, "compile=True: the first step takes minutes longer.")
            compile_layers(policy)
        if self.cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(
                policy, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
            )
        if self.is_sharded:
            parallel.shard(policy, self.cfg.distributed, device=self.device)
            if reference is not None:
                reference.shard(self.cfg.distributed, device=self.device)

    # --- Steps -----------------------------------------------------------------------------------

    @contextmanager
    def session(self, *, stop: Callable[[], None]) -> Iterator[None]:
        """Handle signals, show the progress and profile; ``stop`` is called after a signal."""
        with (
            self.interrupts.handled(stop),
            self.recorder.running(done=self.step),
            self.profiler,
        ):
            yield

    def steps(
        self, *, evaluate: Callable[[], None], save: Callable[[], None]
    ) -> Iterator[StepMetrics]:
        """Yield each step's metrics to be filled in; log, evaluate and save when it is done."""
        evaluate_every = self.cfg.evaluation.every_n_steps
        save_every = self.cfg.saving.every_n_steps
        if self._is_due(evaluate_every):
            evaluate()
        while not self.is_over:
            self._begin_step()
            metrics = StepMetrics()
            with metrics.timer("step_time"):
                yield metrics
            self.step += 1
            self.profiler.step()
            values = metrics.compute() | self.sampler.metrics
            if self.device.type == "cuda":
                values |= training.get_memory_stats(device=self.device)
            seen = self.recorder.step(self.step, values)
            self.sampler.learn(seen["prompt_index"], seen["pass_rate"])
            if self._is_due(evaluate_every):
                evaluate()
            if self.checkpoints.best == self.step or self._is_due(save_every):
                save()

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or an evaluation has ended the run."""
        return self.step >= self.cfg.num_steps or self._is_stopped

    def rounds(self) -> Rounds:
        """Return a step's prompts in rounds; without dynamic sampling there is one round."""
        gate = None if self.outcome_gate is None else self.outcome_gate.reward
        return Rounds(self.cfg, self.dataset, self.sampler.next, gate=gate)

    @property
    def trainer_state(self) -> TrainerState:
        """The run's progress, for the rewards."""
        return TrainerState(self.step, max_steps=self.cfg.num_steps, epoch=self.sampler.epoch)

    def _begin_step(self) -> None:
        """End an interrupted run, or seed what a resumed run repeats: a step or its evaluation."""
        interrupt.check()
        seed_step(self.cfg.seed, self.step)

    def _is_due(self, every: int | None) -> bool:
        return self.step == 0 or self.is_over or (every is not None and self.step % every == 0)

    def evaluate(self, engine: RolloutEngine) -> None:
        """Evaluate the policy, unless the run did so before it was resumed."""
        done = [event["step"] for event in self.recorder.evaluations]
        if self.evaluator is None or self.step in done:
            return
        self._begin_step()
        evaluation = self.evaluator(engine, state=self.trainer_state)
        self.recorder.evaluation(self.step, evaluation)
        self._judge()

    def _judge(self) -> None:
        """Keep the best checkpoint and stop the run, as the evaluations so far say."""
        keys, evaluations = self.cfg.evaluation, self.recorder.evaluations
        reason = should_stop(
            evaluations, metric=keys.keep_best, stop_at=keys.stop_at, patience=keys.patience
        )
        if reason is not None:
            utils.log_rank_zero(log, reason)
        self._is_stopped = reason is not None
        self.checkpoints.keep_best(best_step(evaluations, keys.keep_best))

    # --- Checkpoints -----------------------------------------------------------------------------

    def save(self, policy: TransformerDecoder, optimizer: PolicyOptimizer) -> None:
        """Write the policy and all that a resumed run needs to ``output_dir/step_<n>``."""
        state = {
            "step": self.step,
            "optimizer": optimizer_state(optimizer.optimizer),
            "guard": optimizer.guard.state_dict(),
            "sampler": self.sampler.state_dict(),
            "gate": self.outcome_gate is not None and self.outcome_gate.is_shut,
        }
        folder = self.checkpoints.save(
            policy, state, step=self.step, evaluations=self.recorder.evaluations
        )
        utils.log_rank_zero(log, f"Saved {folder}")

    def begin(
        self,
        policy: TransformerDecoder,
        optimizer: PolicyOptimizer,
        state: Mapping[str, Any] | None,
    ) -> None:
        """Go on from the ``state`` that :meth:`save` wrote; None: check that the run can save."""
        self._optimizer = optimizer
        parallel.on_first_rank(self.checkpoints.keep_base_files)
        if state is None:
            self.checkpoints.rehearse(policy, optimizer.optimizer)
            return
        self.step = state["step"]
        restore_optimizer(
            optimizer.optimizer,
            optimizer.scheduler,
            state["optimizer"],
            steps=self.step * self.cfg.updates_per_step,
        )
        optimizer.guard.load_state_dict(state["guard"])
        self.sampler.load_state_dict(state["sampler"])
        if self.outcome_gate is not None:
            self.outcome_gate.is_shut = state["gate"]
        self.recorder.resume(self.step)
        utils.log_rank_zero(log, f"Resumed after step {self.step}.")
        self._judge()
        self.checkpoints.prune()  # a killed run may have saved but not yet deleted

    def say_how_to_resume(self) -> None:
        text = "Interrupted before the first step was done; the same command starts anew."
        if step := self.checkpoints.last_step:
            folder = checkpoint_folder(Path(self.cfg.output_dir), step)
            text = f"Interrupted. To go on from {folder}, add resume_from_checkpoint=True."
        utils.log_rank_zero(log, text)

    def close(self, *, leave_ranks: bool = False) -> None:
        """End reward processes, loggers and, if asked, the group of ranks."""
        for part in ("rewards", "recorder"):
            if part in vars(self):
                getattr(self, part).close()
        if leave_ranks:
            parallel.end_process_group()


def parse(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Decorate a recipe's entry point, as ``torchtune.config.parse`` does.

    Overrides may also reach into lists, and errors end in one line: see :func:`load_config` and
    :func:`~torchtune_grpo.config.text.errors_in_one_line`.
    """

    @functools.wraps(recipe_main)
    def main() -> Any:
        parser = argparse.ArgumentParser(description=recipe_main.__doc__)
        parser.add_argument("--config", required=True, help="name of a shipped config, or a file")
        args, overrides = parser.parse_known_args()
        end_on_ctrl_c()  # as on other signals, until the recipe handles them
        with errors_in_one_line(keep=write_error):
            code = recipe_main(load_config(args.config, overrides))
        if code:  # a signal's; Python would wait for threads left behind by rewards it has dropped
            with suppress(OSError):  # the terminal is closed
                sys.stdout.flush()
            os._exit(code)
        return code

    return main
