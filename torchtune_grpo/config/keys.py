"""The recipes' config keys: names, types, defaults and meanings, in one table.

``torchtune-grpo config`` prints it as Markdown, and with a config's name checks that one;
``read_config.py`` reads it from YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from omegaconf import DictConfig, ListConfig

from torchtune_grpo.advantages import AGGREGATIONS, NORMALIZATIONS
from torchtune_grpo.config.schema import key, not_negative, one_of, positive, share, temperature
from torchtune_grpo.machine.parallel import DistributedConfig
from torchtune_grpo.rollout import RolloutConfig, SamplingConfig, SamplingParams
from torchtune_grpo.training.importance import CORRECTIONS

__all__ = [
    "DynamicSamplingConfig",
    "EvalSamplingConfig",
    "GRPOConfig",
    "ReferenceConfig",
    "SamplingCorrectionConfig",
    "key",
    "not_negative",
    "one_of",
    "positive",
]


@dataclass(frozen=True, kw_only=True)
class SamplingCorrectionConfig:
    """The keys below ``sampling_correction``: for the gap between sampler and trainer."""

    mode: str | None = one_of(
        "Importance weights, or the sampler's own log-probs in the loss's ratio; null = none; see "
        "docs/objectives.md",
        None,
        CORRECTIONS,
    )
    cap: float = key(
        "Largest such weight", 2.0, valid=lambda v: v > 1, hint="give a number above 1"
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The keys below ``reference``: which policy it is, and the copy full fine-tuning keeps."""

    policy: str = one_of(
        "With adapter_dir: the base with that adapter, or the base alone",
        "start",
        ("start", "base"),
    )
    dtype: str | None = one_of("Its dtype; null = `dtype`", None, ("bf16", "fp32"))
    device: str | None = key("Its device; null = `device`", None)


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """The keys below ``dynamic_sampling``: groups that teach nothing are replaced (DAPO)."""

    max_resamples: int = not_negative(
        "Rounds of further prompts, in each as many as groups of the round before failed; 0 = none",
        0,
    )
    reward: str | None = key(
        "A group fails if this reward is the same for all; null = the weighted sum", None
    )
    min_pass_rate: float | None = share(
        "It also fails if the mean of that reward is lower; null = no bound", None
    )
    max_pass_rate: float | None = share(
        "It also fails if the mean of that reward is higher; null = no bound", None
    )


@dataclass(frozen=True, kw_only=True)
class EvalSamplingConfig:
    """The keys below ``eval_sampling``: of evaluation's samples, instead of the training's."""

    temperature: float | None = temperature("Instead of `temperature`; null = the same", None)
    top_k: int | None = positive("Instead of `sampling.top_k`; null = the same", None)
    top_p: float | None = share(
        "Instead of `sampling.top_p`, 1 = all; null = the same", None, above_0=True
    )
    min_p: float | None = share("Instead of `sampling.min_p`, 0 = none; null = the same", None)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Every key that the recipe reads. Components hold ``_component_`` and its arguments."""

    # What is trained, on what
    output_dir: str = key(
        "Folder for checkpoints, metrics and completions", valid=bool, hint="name a folder"
    )
    model_dir: str | None = key(
        "Folder of a model as the hub has it; the nodes below refer to it by `${model_dir}`", None
    )
    adapter_dir: str | None = key(
        "Folder of a LoRA or DoRA adapter to begin with, PEFT's or torchtune's; null = a new one",
        None,
    )
    prepare: DictConfig | None = key(
        "Component called before anything is read, to make what is missing", None
    )
    tokenizer: DictConfig = key(
        "Component: the tokenizer, of torchtune or `torchtune_grpo.models.hf_tokenizer`"
    )
    checkpointer: DictConfig = key(
        "Component: torchtune's HF checkpointer, or `torchtune_grpo.models.HFCheckpointer`"
    )
    model: DictConfig = key(
        "Component: a builder, of torchtune or `torchtune_grpo.models`; LoRA, QLoRA, DoRA or full"
    )
    dataset: DictConfig = key("Component: prompts to train on, called with the tokenizer")
    sampler: DictConfig | None = key(
        "Component: which prompts come next (docs/data.md); null = shuffled passes over the data",
        None,
    )
    rewards: ListConfig = key(
        "List of components with `name`, `weight` and arguments; see docs/rewards.md"
    )
    max_reward_failure_share: float = share(
        "Stop if a reward fails on more of a step's completions than this share", 0.25
    )
    loss: DictConfig = key("Component: the loss; see docs/loss.md")
    reference: ReferenceConfig = key(
        "The frozen policy that the KL term compares with", ReferenceConfig()
    )
    # Rollout
    batch_size: int = positive("Prompts in a step, on each rank")
    grpo_samples: int = key(
        "Samples in a group (G)",
        valid=lambda v: v >= 2,
        hint="a group of one has no spread to learn from; give at least 2",
    )
    max_generated_tokens: int = positive("Longest response in tokens")
    temperature: float = temperature("Sampling temperature", 1.0)
    sampling: SamplingConfig = key("Filters, penalties and what ends a response", SamplingConfig())
    rollout: RolloutConfig = key("How responses are generated", RolloutConfig())
    dynamic_sampling: DynamicSamplingConfig = key(
        "Whether groups that teach nothing are replaced", DynamicSamplingConfig()
    )
    # Objective
    advantage: str = one_of(
        "Baseline and scale of an advantage; see docs/objectives.md", "group", NORMALIZATIONS
    )
    multi_objective_aggregation: str = one_of(
        "Whether several rewards are summed or normalized first", "sum_then_normalize", AGGREGATIONS
    )
    mask_truncated_completions: bool = key(
        "Do not train on responses without a stop token (their rewards still count)", False
    )
    sampling_correction: SamplingCorrectionConfig = key(
        "Correction for the gap between sampler and trainer", SamplingCorrectionConfig()
    )
    # Optimization
    num_steps: int = positive("Steps of roll-out and update")
    ppo_epochs: int = positive("Passes over each step's samples (the paper's mu)", 1)
    num_minibatches: int = positive(
        "Optimizer steps in each of these passes, on as many parts of the groups", 1
    )
    forward_batch_size: int | None = positive(
        "Rows in a forward and backward pass, at most; null = all of the step's", None
    )
    forward_token_budget: int | None = positive(
        "Tokens in a forward and backward pass, padding included, instead of forward_batch_size",
        None,
    )
    pack_groups: bool = key(
        "Compute a prompt once for all of its responses that are in the same forward pass",
        True,
    )
    optimizer: DictConfig = key("Component: a torch, torchao or bitsandbytes optimizer")
    lr_scheduler: DictConfig | None = key(
        "Component: torchtune's learning-rate schedule; null = constant", None
    )
    clip_grad_norm: float | None = positive("Largest gradient norm; null = no clipping", None)
    # Machine
    device: str = key("cuda, cpu, ...", "cuda")
    dtype: str = one_of(
        "Of weights and activations; what is trained keeps float32 (docs/dtype.md)",
        "bf16",
        ("bf16", "fp32"),
    )
    distributed: DistributedConfig = key("How several ranks share the work", DistributedConfig())
    seed: int = key(
        "Seed of the prompts' order, the sampler and everything else",
        0,
        valid=lambda v: 0 <= v < 2**32,
        hint="give a number from 0 to 4294967295",
    )
    compile: bool = key("Compile the layers for the log-prob and update passes", False)
    enable_activation_checkpointing: bool = key("Recompute activations: less memory", False)
    # Evaluation
    eval_dataset: DictConfig | None = key("Component: held-out prompts; null = no evaluation", None)
    eval_every_n_steps: int | None = positive("Evaluate every n steps; null = start and end", None)
    eval_samples: int = not_negative(
        "Also sample n responses a prompt, for pass@1; 0 = greedy only", 0
    )
    eval_sampling: EvalSamplingConfig = key(
        "How these are sampled, where not as in training", EvalSamplingConfig()
    )
    eval_reward: str | None = key("Reward that decides accuracy; null = the first", None)
    keep_best: str | None = key(
        "Metric of evaluations, such as eval/pass@1: its best checkpoint is kept beside the last",
        None,
        valid=lambda v: v is None or v.startswith("eval/"),
        hint="name a metric of evaluations, such as eval/accuracy",
    )
    stop_at: float | None = share(
        "End the run when an evaluation reaches this (keep_best's metric, or eval/accuracy)", None
    )
    patience: int | None = positive(
        "End the run after so many evaluations in a row that were not its best", None
    )
    # Checkpoints
    save_every_n_steps: int | None = positive("Save every n steps; null = only at the end", None)
    keep_last_n_checkpoints: int | None = positive(
        "Delete older checkpoints; null = keep all", None
    )
    save_adapter_weights_only: bool = key("Leave out the merged weights", False)
    resume_from_checkpoint: bool = key("Continue from the newest checkpoint in output_dir", False)
    # Logging
    metric_logger: DictConfig = key("Component: torchtune's Disk, TensorBoard or W&B logger")
    log_groups: int = not_negative(
        "Groups of each step kept whole in completions.jsonl, informative ones first; 0 = none", 2
    )
    report_every_n_steps: int | None = positive(
        "Write run.html every n steps; null = only at the end", 10
    )
    profiler: DictConfig | None = key("Component: torchtune.training.setup_torch_profiler", None)

    @property
    def sampling_params(self) -> SamplingParams:
        """How responses are sampled."""
        return SamplingParams(
            max_generated_tokens=self.max_generated_tokens,
            temperature=self.temperature,
            **{f.name: getattr(self.sampling, f.name) for f in fields(SamplingConfig)},
        )

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of one step."""
        return self.ppo_epochs * self.num_minibatches

    @property
    def eval_sampling_params(self) -> SamplingParams:
        """How an evaluation's samples are drawn."""
        own = {name: value for name, value in vars(self.eval_sampling).items() if value is not None}
        return replace(self.sampling_params, **own)

    @property
    def rows_per_step(self) -> int:
        """Rows of one step on this rank."""
        return self.batch_size * self.grpo_samples

    @property
    def rows_per_forward(self) -> int:
        """Rows of one forward pass."""
        return self.forward_batch_size or self.rows_per_step
