"""Every key of the config: its name, type, default and meaning.

``torchtune-grpo config`` prints these tables as Markdown; given a config's name, it checks that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from torchtune_grpo.config.schema import (
    Component,
    Components,
    Count,
    Device,
    Float,
    Keys,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    Temperature,
    Text,
    Texts,
    TokenIds,
)

Advantage = Literal["group", "batch", "none", "leave_one_out", "max_rl"]
RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
Correction = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "old_logprobs"
]


class SamplingConfig(Keys):
    """The keys below ``sampling``: what is not sampled, and what ends a response."""

    top_k: PositiveInt | None = None
    """Sample among the k most likely tokens; null = all."""
    top_p: PositiveShare | None = None
    """Sample within this probability mass; null = all."""
    min_p: Share | None = None
    """Leave out tokens below this share of the likeliest token's probability; null = none."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, tokens already in prompt or response become less likely (arXiv:1909.05858, 4.1)."""
    min_new_tokens: Count = 0
    """No stop token and no stop string before this many tokens."""
    suppressed_tokens: TokenIds = ()
    """Token ids that are never sampled."""
    stop_strings: Texts = ()
    """Strings that also end a response, at the token that completes one."""


class SamplingParams(SamplingConfig):
    """The sampling parameters that every engine understands."""

    max_generated_tokens: PositiveInt
    """Longest response in tokens, its stop token included."""
    temperature: Float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    @property
    def greedy(self) -> SamplingParams:
        """The same parameters without chance: always the likeliest token."""
        return self.replace(temperature=0.0, top_k=None, top_p=None, min_p=None)

    @property
    def filters(self) -> bool:
        """Whether some tokens may be left out by their probability."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on the logits."""
        return (
            self.repetition_penalty != 1
            or self.min_new_tokens > 0
            or len(self.suppressed_tokens) > 0
        )


class RolloutConfig(Keys):
    """The keys below ``rollout``: how responses are generated, not what is sampled."""

    engine: Literal["native", "torchtune"] = "native"
    """Generation engine; see docs/rollout.md."""
    max_rows: PositiveInt | None = None
    """Maximum number of responses generated at once; null = as many as memory allows."""
    merge_adapters: Literal["auto", "always", "never"] = "auto"
    """Merge LoRA into copied weights for rollouts (DoRA always is); auto = if exact and it fits."""
    cuda_graphs: Literal["auto", "never"] = "auto"
    """Record decoding steps and replay them, which saves kernel launches; auto = on CUDA."""
    deadline: PositiveFloat | None = None
    """Seconds after which a rollout cuts off unfinished responses; null = no deadline."""


class DynamicSamplingConfig(Keys):
    """The keys below ``dynamic_sampling``: groups that teach nothing are replaced (DAPO)."""

    max_resamples: int = Field(default=0, ge=0, le=1000)
    """Rounds of further prompts, each with one prompt per group still missing; 0 = none."""
    reward: str | None = None
    """A group fails if this reward is the same for all its samples; null = the reward of
    `objective.outcome_gate`, or the weighted sum."""
    min_pass_rate: Share | None = None
    """It also fails if the mean of that reward is lower; null = no bound."""
    max_pass_rate: Share | None = None
    """It also fails if the mean of that reward is higher; null = no bound."""


class ObjectiveConfig(Keys):
    """The keys below ``objective``: how rewards become inputs of the loss (docs/objectives.md)."""

    advantage: Advantage = "group"
    """Baseline and scale of an advantage."""
    multi_objective_aggregation: RewardAggregation = "sum_then_normalize"
    """Whether several rewards are summed or normalized first."""
    outcome_gate: bool | None = None
    """Do not let other rewards alone train a group in which the deciding one is the same for all;
    null = on if there is a deciding reward, and others beside it."""
    mask_truncated_completions: bool = False
    """Do not train on responses without a stop token (their rewards still count)."""
    sampling_correction: Correction | None = None
    """Correction of the gap between sampler and trainer: importance weights, or the sampler's own
    log-probs in the loss's ratio; null = none."""
    correction_cap: Float = Field(default=2.0, gt=1)
    """Largest importance weight."""


class DistributedConfig(Keys):
    """The keys below ``distributed``: how several ranks share the work."""

    sharding: Literal["auto", "always", "never"] = "auto"
    """Spread the model over the ranks (FSDP2); auto = if all of it is trained, or if it takes more
    than half of a rank's free memory."""
    cpu_offload: bool = False
    """Keep a sharded model's shards on the CPU while they are not in use."""


class EvaluationConfig(Keys):
    """The keys below ``evaluation``: how and when held-out prompts are answered."""

    every_n_steps: PositiveInt | None = None
    """Evaluate every n steps; null = at the start and at the end."""
    samples: Count = 0
    """Also sample n responses a prompt, for pass@1; 0 = greedy only."""
    reward: str | None = None
    """Reward that decides accuracy; null = the first one known to tell right from wrong, or else
    the first of all."""
    temperature: Temperature | None = None
    """Replaces `temperature` for evaluation samples; null = the same."""
    top_k: PositiveInt | None = None
    """Replaces `sampling.top_k`; null = the same."""
    top_p: PositiveShare | None = None
    """Replaces `sampling.top_p`; 1 = all, null = the same."""
    min_p: Share | None = None
    """Replaces `sampling.min_p`; 0 = none, null = the same."""
    keep_best: str | None = Field(default=None, pattern="^eval/")
    """Evaluation metric, such as eval/pass@1, whose best checkpoint is kept beside the last."""
    stop_at: Share | None = None
    """End the run when an evaluation reaches this value (of keep_best, or else eval/accuracy)."""
    patience: PositiveInt | None = None
    """End the run after this many evaluations in a row without a new best."""

    @property
    def own_sampling(self) -> dict[str, Any]:
        """The sampling values that replace training's."""
        names = {"temperature", "top_k", "top_p", "min_p"}
        return self.model_dump(include=names, exclude_none=True)


class SavingConfig(Keys):
    """The keys below ``saving``: which checkpoints are written and kept."""

    every_n_steps: PositiveInt | None = None
    """Save every n steps; null = only at the end."""
    keep_last: PositiveInt | None = None
    """Delete older checkpoints; null = keep all."""
    adapter_weights_only: bool = False
    """Leave out the merged weights."""


class GRPOConfig(Keys):
    """Every key that the recipe reads. Components hold ``_component_`` and its arguments."""

    # What is trained, on what
    output_dir: Text
    """Folder for checkpoints, metrics and completions."""
    model_dir: str | None = None
    """Folder of a model in the hub's format; the nodes below refer to it by `${model_dir}`."""
    adapter_dir: str | None = None
    """Folder of a LoRA or DoRA adapter to start from, PEFT's or torchtune's; null = a new one."""
    prepare: Component | None = None
    """Component called before anything is read, to create what is missing."""
    tokenizer: Component
    """Component: a torchtune tokenizer, or `torchtune_grpo.models.hf_tokenizer`."""
    checkpointer: Component
    """Component: torchtune's HF checkpointer, or `torchtune_grpo.models.HFCheckpointer`."""
    model: Component
    """Component: a builder in torchtune or `torchtune_grpo.models`; LoRA, QLoRA, DoRA or full."""
    dataset: Component
    """Component: prompts to train on, called with the tokenizer."""
    sampler: Component | None = None
    """Component: which prompts come next (docs/data.md); null = shuffled passes over the data."""
    rewards: Components
    """List of components with `name`, `weight` and arguments; see docs/rewards.md."""
    max_reward_failure_share: Share = 0.25
    """Stop if a reward fails on more than this share of a step's completions."""
    loss: Component
    """Component: the loss; see docs/loss.md."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """How rewards become inputs of the loss."""
    # Rollout
    batch_size: PositiveInt
    """Prompts per step on each rank."""
    grpo_samples: int = Field(ge=2, le=2**31)
    """Samples in a group (G); a group of one has no spread to learn from."""
    max_generated_tokens: PositiveInt
    """Longest response in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    sampling: SamplingConfig = SamplingConfig()
    """Filters, penalties and what ends a response."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are generated."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Whether groups that teach nothing are replaced."""
    # Optimization
    num_steps: PositiveInt
    """Number of steps, each a rollout and its update."""
    ppo_epochs: PositiveInt = 1
    """Passes over each step's samples (the paper's mu)."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass over the samples; the groups are split into as many parts."""
    forward_batch_size: PositiveInt | None = None
    """Maximum rows in a forward and backward pass; null = all of the step's."""
    forward_token_budget: PositiveInt | None = None
    """Maximum tokens in a forward and backward pass, with padding; replaces forward_batch_size."""
    pack_groups: bool = True
    """Compute a prompt once for all of its responses in the same forward pass."""
    optimizer: Component
    """Component: a torch, torchao or bitsandbytes optimizer."""
    lr_scheduler: Component | None = None
    """Component: torchtune's learning-rate schedule; null = constant."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest gradient norm; null = no clipping."""
    # Machine
    device: Device = "cuda"
    """cuda, cpu, ..."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of weights and activations; trained weights keep more precision (docs/dtype.md)."""
    distributed: DistributedConfig = DistributedConfig()
    """How several ranks share the work."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the prompts' order, the sampler and everything else."""
    compile: bool = False
    """Compile the layers for the log-prob and update passes."""
    enable_activation_checkpointing: bool = False
    """Recompute activations to save memory."""
    # Evaluation, checkpoints and logs
    eval_dataset: Component | None = None
    """Component: held-out prompts; null = no evaluation."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How and when held-out prompts are answered."""
    saving: SavingConfig = SavingConfig()
    """Which checkpoints are written and kept."""
    resume_from_checkpoint: bool = False
    """Continue from the newest checkpoint in output_dir."""
    metric_logger: Component
    """Component: torchtune's Disk, TensorBoard or W&B logger."""
    log_groups: Count = 2
    """Groups of each step kept whole in completions.jsonl, informative ones first; 0 = none."""
    profiler: Component | None = None
    """Component: torchtune.training.setup_torch_profiler."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if problems := list(contradictions(self)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters with which training's responses are sampled."""
        return SamplingParams(
            max_generated_tokens=self.max_generated_tokens,
            temperature=self.temperature,
            **dict(self.sampling),
        )

    @property
    def eval_sampling_params(self) -> SamplingParams:
        """The parameters with which an evaluation's responses are sampled."""
        return self.sampling_params.replace(**self.evaluation.own_sampling)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of one step."""
        return self.ppo_epochs * self.num_minibatches


def contradictions(cfg: GRPOConfig) -> Iterator[str]:
    """Yield a sentence, with the remedy, for each pair of keys that contradict each other."""
    output_dir = Path(cfg.output_dir).resolve()
    base = cfg.checkpointer.get("checkpoint_dir")
    if cfg.sampling.min_new_tokens > cfg.max_generated_tokens:
        yield (
            f"sampling.min_new_tokens={cfg.sampling.min_new_tokens}: give 0 to "
            f"max_generated_tokens={cfg.max_generated_tokens}."
        )
    if cfg.forward_token_budget is not None and cfg.forward_batch_size is not None:
        yield (
            f"forward_token_budget={cfg.forward_token_budget}: replaces forward_batch_size="
            f"{cfg.forward_batch_size}; set one of them to null."
        )
    if cfg.batch_size % cfg.num_minibatches:
        yield (
            f"num_minibatches={cfg.num_minibatches}: cannot deal out batch_size={cfg.batch_size} "
            "groups evenly; give a divisor."
        )
    if cfg.checkpointer.get("adapter_checkpoint") is not None:
        yield (
            f"checkpointer.adapter_checkpoint={cfg.checkpointer.adapter_checkpoint}: is not read; "
            "set it to null, and adapter_dir to its folder."
        )
    if not isinstance(base, str) or not base:
        yield "checkpointer.checkpoint_dir: missing; name the folder of the base model."
    elif Path(base).resolve() == output_dir:
        yield (
            f"output_dir={cfg.output_dir}: is also checkpointer.checkpoint_dir, whose files would "
            "be overwritten; give another folder."
        )
    for key, folder in (("checkpointer.checkpoint_dir", base), ("adapter_dir", cfg.adapter_dir)):
        path = Path(str(folder or ".")).resolve()
        if any(
            p.parent == output_dir and p.name.startswith("step_") for p in (path, *path.parents)
        ):
            yield (
                f"{key}={folder}: is a checkpoint in output_dir={cfg.output_dir}, from where a new "
                "run moves it; give another output_dir."
            )
    low, high = cfg.dynamic_sampling.min_pass_rate, cfg.dynamic_sampling.max_pass_rate
    if low is not None and high is not None and low > high:
        yield (
            f"dynamic_sampling.min_pass_rate={low}: above max_pass_rate={high}, so that no group "
            "passes; give less."
        )
    for name in ("keep_best", "stop_at", "patience"):
        value = getattr(cfg.evaluation, name)
        if value is not None and cfg.eval_dataset is None:
            yield (
                f"evaluation.{name}={value}: needs evaluations; set eval_dataset to held-out "
                "prompts."
            )
    for number, reward in enumerate(cfg.rewards):
        weight = reward.get("weight", 1.0)
        if isinstance(weight, (int, float)) and abs(weight) > 3.4e38:
            yield f"rewards[{number}].weight={weight}: give a number that float32 can hold."


def without_effect(cfg: GRPOConfig) -> Iterator[str]:
    """Yield a sentence, with the remedy, for each setting that the others switch off."""
    correction = cfg.objective.sampling_correction
    if correction in (None, "old_logprobs") and cfg.objective.correction_cap != 2.0:
        yield "objective.correction_cap: nothing is capped; set sampling_correction."
    if cfg.optimizer.get("lr") == 0:
        yield f"optimizer.lr={cfg.optimizer.lr}: no weight ever changes; set it above 0."
    goals = (cfg.evaluation.stop_at, cfg.evaluation.patience)
    if cfg.evaluation.every_n_steps is None and goals != (None, None):
        yield (
            "evaluation.stop_at and patience: a run is evaluated only at its start and end; set "
            "evaluation.every_n_steps."
        )
    if cfg.dynamic_sampling != DynamicSamplingConfig() and cfg.dynamic_sampling.max_resamples == 0:
        yield "dynamic_sampling: no group is replaced with max_resamples=0; set that above 0."
    if (own := cfg.evaluation.own_sampling) and cfg.evaluation.samples == 0:
        yield f"evaluation.{', '.join(own)}: set evaluation.samples above 0."
    if cfg.updates_per_step == 1 and correction != "old_logprobs":
        ratio = ("epsilon_low", "epsilon_high", "dual_clip", "surrogate")
        keys = ", ".join(f"loss.{key}" for key in ratio if cfg.loss.get(key) is not None)
        if keys:
            yield (
                f"{keys}: with one optimizer step per rollout, every ratio is 1; set ppo_epochs or "
                "num_minibatches above 1, or objective.sampling_correction to old_logprobs."
            )
