"""A run: everything that a config describes, each part made when it is first used.

The recipe, the Python API and the commands share it, and so does the check of a config, which makes
everything but the weights.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training, utils
from torchtune.modules import TransformerDecoder

from torchtune_grpo.advantages import OutcomeGate
from torchtune_grpo.checkpoint.checkpoints import Checkpoints, check_state
from torchtune_grpo.checkpoint.folder import (
    claim_output_dir,
    mark_begun,
    set_aside_previous_run,
)
from torchtune_grpo.checkpoint.resume import restore_optimizer
from torchtune_grpo.config.check import check_imports, instantiate, read_config
from torchtune_grpo.config.keys import GRPOConfig, SamplingParams
from torchtune_grpo.config.text import noted
from torchtune_grpo.data.dataset import Item, PromptData, collate_prompts, first_prompts
from torchtune_grpo.data.samplers import make_sampler
from torchtune_grpo.environments.environment import (
    Environment,
    environment_rewards,
    make_environment,
    prompt_tokenizer,
)
from torchtune_grpo.environments.kinds import kind_fault, make_kinds
from torchtune_grpo.environments.sessions import Kind
from torchtune_grpo.evaluation.evaluator import Evaluator
from torchtune_grpo.loss import Loss, make_loss
from torchtune_grpo.machine import parallel
from torchtune_grpo.machine.device import (
    choose_threads,
    find_device,
    free_bytes,
    keep_freed_memory,
    multiplies_bf16,
    only_warnings,
    weight_bytes,
)
from torchtune_grpo.machine.interrupt import Interrupts
from torchtune_grpo.machine.progress import Meter
from torchtune_grpo.models import gguf
from torchtune_grpo.models.kinds import kind_of
from torchtune_grpo.models.tiny import SHIPPED
from torchtune_grpo.models.tokenizer import HFTokenizer
from torchtune_grpo.monitor.recorder import Recorder
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.rollout import sample_groups
from torchtune_grpo.rollout.engine import add_wishes, capabilities_of, check_engine, make_engine
from torchtune_grpo.rollout.request import EngineContext, RolloutEngine
from torchtune_grpo.training.checks import check_model, check_prompts
from torchtune_grpo.training.dynamic_sampling import Rounds
from torchtune_grpo.training.memory import choose_passes
from torchtune_grpo.training.optimizer import PolicyOptimizer, training_bytes
from torchtune_grpo.training.parts import Parts
from torchtune_grpo.training.policy import empty_model, load_policy, make_policy, should_shard
from torchtune_grpo.training.reference import Reference
from torchtune_grpo.trajectory import Trajectory

log = utils.get_logger("INFO")


class Run:
    """A config and the parts made from it; raises a ConfigError with all mistakes in the config.

    ``table`` is a subclass of the table of keys if a recipe has keys of its own. From Python,
    ``objects`` holds what no config can name, by key: rows of ``dataset`` and ``eval_dataset``, the
    reward of ``rewards.0``, and environments and tools.
    """

    def __init__(
        self,
        cfg: DictConfig,
        table: type[GRPOConfig] = GRPOConfig,
        *,
        objects: Mapping[str, object] | None = None,
    ) -> None:
        self.given = cfg.copy()
        OmegaConf.set_readonly(self.given, False)  # its paths are completed
        add_wishes(self.given)
        self.cfg = read_config(self.given, table)
        if self.cfg.dtype == "auto":
            is_fast = multiplies_bf16(torch.device(self.cfg.device))
            self.given.dtype = "bf16" if is_fast else "fp32"
            self.cfg = self.cfg.model_copy(update={"dtype": self.given.dtype})
        self._objects = objects or {}
        self._optimizer: PolicyOptimizer | None = None
        self._engine: RolloutEngine | None = None
        self._longest_prompt = 0  # of the data set's rows that were checked, in tokens
        self.interrupts = Interrupts()

    # --- Before weights are read -----------------------------------------------------------------

    @cached_property
    def device(self) -> torch.device:
        """This rank's device; asking for it joins the ranks that torchrun has started."""
        device = find_device(self.cfg.device)
        parallel.init_process_group(device, self.cfg.distributed)
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
        return RewardSet.from_config(
            [*self.cfg.rewards, *environment_rewards(self.environment_kinds)],
            self._objects,
            deciding=self.cfg.deciding_reward,
            max_failure_share=self.cfg.max_reward_failure_share,
            seed=self.cfg.seed,
        )

    @cached_property
    def environment_kinds(self) -> dict[str | None, Kind]:
        """The kinds of environments that answer the policy; empty for responses of one turn."""
        return make_kinds(self.cfg.environment, self.cfg.tools, self._objects)

    @cached_property
    def environment(self) -> Environment | None:
        """What answers the policy between its turns about a training prompt, if anything does."""
        return self.environment_of(self.dataset)

    def environment_of(self, dataset: PromptData) -> Environment | None:
        """Return what answers the policy about the prompts of a data set."""
        if not self.environment_kinds:
            return None
        context = self.empty_model.max_seq_len
        return make_environment(
            self.environment_kinds,
            self.cfg.environment,
            encoder=dataset.encoder,
            tokenizer=self.tokenizer,
            context=min(context, capabilities_of(self.cfg.rollout).longest_row or context),
        )

    @cached_property
    def outcome_gate(self) -> OutcomeGate | None:
        """The gate that keeps shaping rewards from training alone, if wanted and any exist."""
        name = self.rewards.gate(self.cfg.objective.outcome_gate)
        return None if name is None else OutcomeGate(name)

    @cached_property
    def loss(self) -> Loss:
        return make_loss(self.cfg.loss)

    @cached_property
    def dataset(self) -> PromptData:
        """The prompts to train on."""
        return self.load_dataset("dataset", self.cfg)

    @cached_property
    def eval_dataset(self) -> PromptData | None:
        """The held-out prompts, if there are any."""
        key = "eval_dataset"
        return None if self.cfg.eval_dataset is None else self.load_dataset(key, self.cfg)

    def load_dataset(self, key: str, cfg: GRPOConfig) -> PromptData:
        """Load the data set of a config's key, and check it against the rewards and the model."""
        tokenizer = prompt_tokenizer(self.environment_kinds, self.tokenizer)
        dataset = self._read_rows(key, getattr(cfg, key), tokenizer)
        self.check_dataset(dataset, key)
        return dataset

    def _read_rows(self, key: str, node: DictConfig, tokenizer: Any) -> PromptData:
        rows = {"rows": self._objects[key]} if key in self._objects else {}
        return instantiate(key, node, tokenizer, **rows)

    def check_dataset(self, dataset: PromptData, key: str) -> None:
        """Check that rewards can score answers to its rows, and that its prompts fit the model."""
        self._check_rows(dataset, key)
        dataset.check(partial(self._check_prompts, key), where=key)

    def _check_rows(self, dataset: PromptData, key: str) -> None:
        if self.environment_kinds:
            dataset.check(self._check_kinds, where=key)
        self.rewards.check_data(dataset, key=key)

    def _check_rows_alone(self, key: str) -> None:
        """Read rows and columns while the model is not there, with a tokenizer that always is."""
        if (node := getattr(self.cfg, key)) is not None:
            node = DictConfig({k: v for k, v in node.items() if k != "max_prompt_tokens"})
            self._check_rows(self._read_rows(key, node, HFTokenizer(str(SHIPPED))), key)

    def _check_kinds(self, items: Sequence[Item]) -> dict[int, str | None]:
        kinds = self.environment_kinds
        return {n: kind_fault(kinds, item["columns"]) for n, item in enumerate(items)}

    def _check_prompts(self, key: str, items: Sequence[Item]) -> dict[int, str | None]:
        prompts = [item["tokens"] for item in items]
        check_prompts(self.cfg, key, prompts, model=self.empty_model)
        if key == "dataset":
            self._longest_prompt = max(self._longest_prompt, *map(len, prompts))
        return {}

    @cached_property
    def sampler(self) -> Any:
        """The sampler, which decides which prompts come next."""
        make = partial(make_sampler, self.cfg.sampler, self.dataset, seed=self.cfg.seed)
        on_trial = make()
        rows = on_trial.next(self.cfg.batch_size * parallel.world_size())
        on_trial.learn(rows, [0.5] * len(rows))
        check_state("sampler", on_trial.state_dict())
        return make()

    @cached_property
    def evaluator(self) -> Evaluator | None:
        """The evaluator of policies on the held-out prompts, if there are any."""
        if self.eval_dataset is None:
            return None
        seen = 0.0  # as without training
        if "dataset" in vars(self):
            held_out, trained = map(first_prompts, (self.eval_dataset, self.dataset))
            seen = len(held_out & trained) / len(held_out)
        if seen:
            too = f"dataset has {seen:.0%} of its prompts, too, which are not held out"
            utils.log_rank_zero(log, f"eval_dataset: {too}; give another split or other rows.")
        return self.make_evaluator(self.eval_dataset, self.cfg, trained_on=seen)

    def items_of(self, prompts: Sequence[object]) -> list[Item]:
        """Turn prompts from outside the data set into items like its own."""
        items = [self.dataset.item(prompt, index) for index, prompt in enumerate(prompts)]
        self._check_prompts("prompts", items)
        return items

    def answer(
        self,
        engine: RolloutEngine,
        items: Sequence[Item],
        *,
        group_size: int,
        params: SamplingParams,
        seed: int,
    ) -> Trajectory:
        """Sample a group of responses for each item, outside of training: [B*G] rows."""
        with Meter("Answers", total=len(items) * group_size) as meter:
            return sample_groups(
                engine,
                collate_prompts(items),
                tokenizer=self.tokenizer,
                group_size=group_size,
                params=params,
                prefill=self.dataset.prefill,
                seed=seed,
                step=0,
                environment=self.environment,
                report=lambda now: meter.show(done=now.finished, tokens=now.tokens),
            )

    def make_evaluator(
        self, dataset: PromptData, cfg: GRPOConfig, *, trained_on: float = 0.0
    ) -> Evaluator:
        """Make an evaluator for a data set, which samples as a config says."""
        return Evaluator(
            cfg,
            dataset,
            tokenizer=self.tokenizer,
            rewards=self.rewards,
            environment=self.environment_of(dataset),
            trained_on=trained_on,
        )

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints, and the model that it starts from."""
        given = [key for key in ("dataset", "eval_dataset") if key in self._objects]
        digests = {f"{key}.rows": getattr(self, key).digest for key in given}
        return Checkpoints(self.cfg, digests=digests)

    @cached_property
    def recorder(self) -> Recorder:
        return Recorder(
            self.cfg,
            self.given,
            rewards=self.rewards.ranges,
            decider=self.rewards.decider,
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

    def check(self) -> tuple[list[str], list[str]]:
        """Make all that needs no weights; return mistakes, and remarks on what is not checked."""
        problems: list[str] = []
        remarks: list[str] = []
        with noted(remarks):
            find_device(self.cfg.device)
        with noted(problems):
            check_engine(self.cfg)
        for part in ("loss", "environment_kinds", "outcome_gate"):  # the gate makes the rewards
            with noted(problems):
                getattr(self, part)
        with noted(problems):
            check_imports("metric_logger", self.cfg.metric_logger)
        folder = Path(self.cfg.checkpointer.checkpoint_dir)
        awaited = (
            "prepare: the model is fetched" if self.cfg.prepare and not folder.exists() else ""
        )
        if gguf.awaits_conversion(folder):
            awaited = f"model_dir={folder}: its GGUF is converted"
        if awaited:
            remarks.append(f"{awaited} when a run starts, and not checked yet.")
        else:
            with noted(problems):
                check_model(self.cfg)
                _ = self.tokenizer
        if not awaited and not problems:
            for part in ("dataset", "environment", "evaluator", "sampler"):
                with noted(problems):
                    getattr(self, part)
        else:
            for key in ("dataset", "eval_dataset"):
                with noted(problems):
                    self._check_rows_alone(key)
        return list(dict.fromkeys(problems)), remarks

    def prepare_model(self) -> None:
        """Join the other ranks, prepare the model's folder and check it."""
        is_cpu = self.device.type == "cpu"
        check_engine(self.cfg)
        parallel.on_first_rank(config.instantiate, self.cfg.prepare)
        parallel.on_first_rank(gguf.complete, Path(self.cfg.checkpointer.checkpoint_dir))
        check_model(self.cfg)
        if is_cpu:
            keep_freed_memory(weight_bytes(self.empty_model))
            choose_threads(self.empty_model)

    def _prepare_training(self) -> Path | None:
        """Claim ``output_dir`` and make all that needs no weights, so that mistakes surface here.

        Returns the checkpoint to resume from, if any.
        """
        _ = self.device, self.loss, self.outcome_gate
        restarted, folder = parallel.is_restarted(), Path(self.cfg.output_dir)
        parallel.on_first_rank(claim_output_dir, folder)
        if not restarted:
            parallel.on_first_rank(lambda: mark_begun(folder, begun=False))
        with only_warnings():
            training.set_seed(seed=self.cfg.seed)
        self.prepare_model()
        if self.device.type == "cpu":
            utils.log_rank_zero(log, f"CPU threads: {torch.get_num_threads()}.")
        checkpoint = parallel.on_first_rank(self.checkpoints.to_resume, restarted)
        for part in ("is_sharded", "checkpoints", "dataset", "evaluator", "sampler"):
            getattr(self, part)
        if checkpoint is None:
            parallel.on_first_rank(set_aside_previous_run, self.cfg)
            begun = parallel.may_be_restarted()
            parallel.on_first_rank(lambda: mark_begun(folder, begun=begun))
        if self.environment is not None:
            item = self.dataset[0]
            self.environment.check_sessions(item["columns"], item["prompt"])
        _ = self.recorder
        return checkpoint

    # --- The policy ------------------------------------------------------------------------------

    def build(self) -> Parts:
        """Build all that training needs, from the checkpoint that the run goes on from, if any.

        Mistakes in the config are reported before weights are read. Layers are compiled and sharded
        behind the engine, which reads them as they are, and behind all copying and loading.
        """
        checkpoint = self._prepare_training()
        policy = self._load_policy()
        reference = Reference(policy) if self.loss.needs_reference else None
        state = None if checkpoint is None else self.checkpoints.restore(policy, checkpoint)
        engine = self.make_engine(policy)
        self._prepare_passes(policy, reference)
        optimizer = self._optimizer = PolicyOptimizer(self.cfg, policy)
        if state is not None:
            self._resume(state, optimizer)
        return Parts(
            cfg=self.cfg,
            loss=self.loss,
            policy=policy,
            reference=reference,
            engine=engine,
            optimizer=optimizer,
            steps_done=0 if state is None else state["step"],
        )

    def _resume(self, state: Mapping[str, Any], optimizer: PolicyOptimizer) -> None:
        """Go on from what ``Steps.save`` has written into a checkpoint."""
        steps = state["step"] * self.cfg.updates_per_step
        restore_optimizer(optimizer.optimizer, optimizer.scheduler, state["optimizer"], steps=steps)
        optimizer.guard.load_state_dict(state["guard"])
        self.sampler.load_state_dict(state["sampler"])
        if self.outcome_gate is not None:
            self.outcome_gate.is_shut = state["gate"]
        self.recorder.resume(state["step"])

    def _load_policy(self) -> TransformerDecoder:
        """Load the weights that training starts from, the same on all ranks.

        A model to be sharded has them on the first rank, and is on meta on the others.
        """
        device = self.device
        if self.is_sharded:  # too large for a device, or the host has no memory for one per rank
            device = torch.device("cpu" if parallel.rank() == 0 else "meta")
        model = make_policy(self.cfg, device=device)
        if not kind_of(model).packs_rows:
            self.cfg = self.cfg.replace(pack_groups=False)
        base = self.checkpoints.base_weights
        parallel.load_once(model, lambda: load_policy(model, self.cfg, base(model)))
        if not self.is_sharded:
            parallel.broadcast_trained_parameters(model)
        return model

    def make_engine(self, policy: TransformerDecoder) -> RolloutEngine:
        """Make the engine that generates responses with the policy's current weights."""
        context = EngineContext(
            policy,
            self.cfg.rollout,
            self.device,
            bytes_to_come=self._bytes_to_come,
            model_dir=self.cfg.checkpointer.checkpoint_dir,
        )
        self._engine = make_engine(context)
        return self._engine

    def _bytes_to_come(self) -> int:
        """Return the bytes of device memory that training will still take, if there is any."""
        return 0 if self._optimizer is None else self._optimizer.bytes_to_come(self.device)

    def _choose_passes(self, policy: TransformerDecoder) -> GRPOConfig:
        """Return the config with what fits beside the models where it says auto."""
        free = None
        if self.device.type == "cuda" and not self.is_sharded:  # it holds the whole model
            own = free_bytes(self.device) - training_bytes(self.cfg.optimizer, policy.parameters())
            free = min(parallel.gather_over_ranks(own))
        longest = self._longest_prompt + self.cfg.max_response_tokens
        return choose_passes(self.cfg, policy, longest=longest, free=free)

    def load_engine(self, checkpoint: Path | None) -> RolloutEngine:
        """Make the engine with a checkpoint's weights, and print which; None = before training."""
        if parallel.rank() == 0:
            print(f"Weights: {checkpoint or self.cfg.checkpointer.checkpoint_dir}")
        self._end_engine()
        gc.collect()  # free one policy's memory before the next one is loaded
        if checkpoint is not None:
            self.checkpoints.check_policy(checkpoint)
        model = self._load_policy()
        if checkpoint is not None:
            self.checkpoints.restore(model, checkpoint)
        engine = self.make_engine(model.eval())
        if self.is_sharded:
            parallel.shard(model, device=self.device)
        return engine

    def newest_checkpoint(self) -> Path | None:
        """The run's newest checkpoint; None before the first one."""
        with suppress(ValueError):
            return self.checkpoints.newest()
        return None

    def _prepare_passes(self, policy: TransformerDecoder, reference: Reference | None) -> None:
        """Checkpoint and shard the layers, and put what fits in place of auto."""
        if "auto" in (self.cfg.forward_batch_size, self.cfg.enable_activation_checkpointing):
            self.cfg = self._choose_passes(policy)
        if self.cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(
                policy, auto_wrap_policy={*map(type, policy.layers)}
            )
        if self.is_sharded:
            parallel.shard(policy, device=self.device)
            if reference is not None:
                reference.shard(device=self.device)

    # --- Training --------------------------------------------------------------------------------

    def rounds(self) -> Rounds:
        """Return a step's prompts in rounds; without dynamic sampling there is one round."""
        gate = None if self.outcome_gate is None else self.outcome_gate.reward
        return Rounds(self.cfg, self.dataset, self.sampler.next, gate=gate)

    def close(self, *, leave_ranks: bool = False) -> None:
        """End environments, reward processes, loggers, engine and, if asked, the group of ranks."""
        for kind in vars(self).pop("environment_kinds", {}).values():
            kind.close()
        for part in ("rewards", "recorder"):
            if part in vars(self):
                getattr(self, part).close()
        self._end_engine()
        if leave_ranks:
            parallel.end_process_group()

    def _end_engine(self) -> None:
        """End the engine, and let go of its model."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
