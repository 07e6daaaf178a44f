"""Every key of the config: its name, type, default and meaning.

``torchtune-grpo config`` prints them as a table in Markdown; given a config's name, it checks that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from omegaconf import DictConfig
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SETTINGS = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    protected_namespaces=(),
    use_attribute_docstrings=True,
)
LARGEST_INT = 2**63 - 1
LARGEST_FLOAT32 = 3.4028234e38
ENGINES = "torchtune_grpo.rollout.engine"  # the module with the engines that have short names


def _number(value: Any) -> Any:
    """Turn a string into a number if it is one: YAML reads 1e-4 as a string."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _component(value: Any) -> Any:
    if isinstance(value, str) and value:
        value = {"_component_": value}  # without arguments
    if isinstance(value, Mapping) and isinstance(value.get("_component_"), str):
        return DictConfig(value)
    raise ValueError("give a mapping with _component_, the dotpath of a class or function")


def _engine(value: Any) -> Any:
    """Read an engine's node, which may be a name alone, or arguments of the default engine."""
    node = value if isinstance(value, Mapping) else {"_component_": value}
    name = node.get("_component_", RolloutConfig.model_fields["engine"].default)
    if isinstance(name, str) and name.isidentifier():
        name = f"{ENGINES}.{name}"
    return _component({**node, "_component_": name})


def _device(value: Any) -> Any:
    try:
        torch.device(value)
    except RuntimeError as error:
        raise ValueError("give cpu or cuda") from error
    return value


Float = Annotated[float, BeforeValidator(_number), Field(le=LARGEST_FLOAT32, ge=-LARGEST_FLOAT32)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
PositiveShare = Annotated[Float, Field(gt=0, le=1)]
Temperature = Annotated[Float, Field(ge=1e-6)]
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # given as a list
Device = Annotated[str, AfterValidator(_device)]
Component = Annotated[DictConfig, BeforeValidator(_component)]
Engine = Annotated[DictConfig, BeforeValidator(_engine)]

Advantage = Literal["group", "batch", "none", "leave_one_out", "max_rl"]
RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
Correction = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "old_logprobs"
]


class Keys(BaseModel):
    """A table of config keys, each fully described by its type, default and docstring.

    A key whose value is a table has that table's docstring.
    """

    model_config = SETTINGS

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, checked again."""
        return type(self)(**{**dict(self), **changes})


class SamplingConfig(Keys):
    """Filters, penalties and what ends a response."""

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
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on the logits."""
        return self.repetition_penalty != 1 or self.min_new_tokens > 0


class RolloutConfig(Keys):
    """The generation engine, its memory and its deadline."""

    engine: Engine = Field(default="native", validate_default=True)
    """Generation engine: native, transformers, vllm, vllm_server, or a component of your own
    (docs/rollout.md)."""
    max_rows: PositiveInt | None = None
    """Maximum number of responses generated at once; null = as many as memory allows."""
    deadline: PositiveFloat | None = None
    """Seconds after which a rollout cuts off unfinished responses; null = no deadline."""


class DynamicSamplingConfig(Keys):
    """Replacement of groups that teach nothing (DAPO)."""

    max_resamples: int = Field(default=0, ge=0, le=1000)
    """Rounds of further prompts, each with one prompt per group still missing; 0 = none. A group
    fails if the reward of `objective.outcome_gate`, or else the weighted sum, is the same for all
    its samples."""


class ObjectiveConfig(Keys):
    """The way from rewards to the inputs of the loss (docs/objectives.md)."""

    advantage: Advantage = "group"
    """Baseline and scale of an advantage."""
    multi_objective_aggregation: RewardAggregation = "sum_then_normalize"
    """Whether several rewards are summed or normalized first."""
    outcome_gate: bool | None = None
    """Do not let other rewards alone train a group in which the deciding one is the same for all;
    null = on if there is a deciding reward, and others beside it."""
    mask_truncated_completions: bool = False
    """Do not train on responses that were cut off (their rewards still count)."""
    sampling_correction: Correction | None = None
    """Correction of the gap between sampler and trainer: importance weights, or the sampler's own
    log-probs in the loss's ratio; null = none. The default is what the engine wants, which is
    token_truncate for vLLM."""
    correction_cap: Float = Field(default=2.0, gt=1)
    """Largest importance weight."""


class DistributedConfig(Keys):
    """The division of the work among several ranks."""

    sharding: Literal["auto", "always", "never"] = "auto"
    """Spread the model over the ranks (FSDP2); auto = if all of it is trained, or if it takes more
    than half of a rank's free memory."""
    timeout_minutes: Annotated[Float, Field(gt=0)] = 30
    """Time that ranks wait for one that is late, as when a judge hangs; then the run ends."""


class EvaluationConfig(Keys):
    """Answers to held-out prompts: when, how many, and what they decide."""

    every_n_steps: PositiveInt | None = None
    """Evaluate every n steps; null = at the start and at the end."""
    samples: Count = 0
    """Also sample n responses a prompt, for pass@1; 0 = greedy only."""
    sampling: dict[str, Any] = {}
    """Changes to training's sampling, such as `{temperature: 0.6, top_p: null}`; {} = none."""
    keep_best: str | None = Field(default=None, pattern="^eval/")
    """Evaluation metric, such as eval/pass@1, whose best checkpoint is kept beside the last."""
    stop_at: Share | None = None
    """End the run when an evaluation reaches this value (of keep_best, or else eval/accuracy)."""


class SavingConfig(Keys):
    """The checkpoints that are written and kept."""

    every_n_steps: PositiveInt | None = None
    """Save every n steps; null = only at the end."""
    keep_last: PositiveInt | None = None
    """Delete older checkpoints; null = keep all."""
    adapter_weights_only: bool = False
    """Leave out the merged weights."""


class EnvironmentConfig(Keys):
    """Rollouts of several turns (docs/environments.md).

    Beside these keys stand `_component_`, the dotpath of an environment, and its arguments; or
    several environments by name, each with its own, which the data's column `environment` chooses;
    null = none.
    """

    model_config = SETTINGS | ConfigDict(extra="allow")

    max_turns: PositiveInt = 16
    """Most turns of the policy in a conversation."""
    max_response_tokens: PositiveInt | None = None
    """Most tokens of a response, sampled or not; null = max_generated_tokens."""
    form: Literal["message", "inline"] = "message"
    """Where an answer of `step` stands: in a message of its own, or in the policy's message, behind
    a stop string."""
    timeout: PositiveFloat = 60.0
    """Seconds that an environment may take to answer a turn; then its process is killed, and that
    conversation ends."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if value is None:
            return {}
        return {"_component_": value} if isinstance(value, str) else value

    @property
    def components(self) -> dict[str | None, dict[str, Any]]:
        """The nodes of the environments by name; None is the name of a single one."""
        nodes: dict[str, Any] = dict(self.model_extra or {})
        if "_component_" in nodes or not nodes:
            return {None: nodes} if nodes else {}
        return {n: {"_component_": v} if isinstance(v, str) else v for n, v in nodes.items()}


class GRPOConfig(Keys):
    """Every key that the recipe reads.

    A component is a node with `_component_`, the dotpath of a class or function, and its arguments.
    `base_config: NAME_OR_FILE` starts a config from another: nodes are merged, and a node with
    another `_component_` replaces the base's. `algorithm: NAME` sets the keys of a published
    algorithm (docs/objectives.md), which the config's own keys change.

    On the command line, `key=value` sets a key, `rewards.0.weight=0.5` one in a list,
    `model=my.builder` replaces a component (arguments that the new one accepts are kept),
    `eval_dataset=null` removes an optional key, `~key` any key, and `algorithm=NAME` changes the
    config's own keys.

    `torchtune-grpo config my_config.yaml batch_size=4` checks all that it can without weights: each
    mistake is a line, a known setting without effect a warning. `TORCHTUNE_GRPO_TRACEBACK=1` shows
    where an error was raised; once a run has begun, `output_dir/error.txt` does.
    """

    # What is trained, on what
    output_dir: Text
    """Folder for checkpoints, metrics and completions."""
    model_dir: str | None = None
    """Folder of a model in the hub's format; the nodes below refer to it by `${model_dir}`."""
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
    environment: EnvironmentConfig = EnvironmentConfig()
    tools: Texts = ()
    """Dotpaths of functions that the policy may call (docs/environments.md)."""
    rewards: list[Component] = []
    """List of components with `name`, `weight` and arguments; see docs/rewards.md. An environment
    may have a reward of its own."""
    deciding_reward: str | None = None
    """Name of the reward that says which answers are right: for accuracy, `objective.outcome_gate`,
    dynamic sampling and samplers; null = the first that declares to, of those that train if any
    does, or else the first of all."""
    max_reward_failure_share: Share = 0.25
    """Stop if a reward fails on more than this share of a step's completions."""
    loss: Component
    """Component: the loss; see docs/extending.md."""
    objective: ObjectiveConfig = ObjectiveConfig()
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
    rollout: RolloutConfig = RolloutConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    # Optimization
    num_steps: PositiveInt
    """Number of steps, each a rollout and its update."""
    ppo_epochs: PositiveInt = 1
    """Passes over each step's samples (the paper's mu)."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps in each pass over the samples; the groups are split into as many parts."""
    forward_batch_size: PositiveInt | Literal["auto"] | None = None
    """Maximum rows in a forward and backward pass; null = all of the step's; auto = as many as fit
    (docs/hardware.md#memory)."""
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
    dtype: Literal["bf16", "fp32", "auto"] = "bf16"
    """Dtype of weights and activations; auto = bf16 where the device has instructions for it, else
    fp32. Trained weights keep more precision (docs/hardware.md)."""
    distributed: DistributedConfig = DistributedConfig()
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the prompts' order, the sampler and everything else."""
    enable_activation_checkpointing: bool | Literal["auto"] = False
    """Recompute activations to save memory; auto = unless passes fit without
    (docs/hardware.md#memory)."""
    # Evaluation, checkpoints and logs
    eval_dataset: Component | None = None
    """Component: held-out prompts; null = no evaluation."""
    evaluation: EvaluationConfig = EvaluationConfig()
    saving: SavingConfig = SavingConfig()
    resume_from_checkpoint: bool | Literal["auto"] = False
    """Continue from the newest checkpoint in output_dir; auto = if there is one."""
    metric_logger: Component
    """Component: one of torchtune's loggers (docs/reading_a_run.md)."""
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
        return self.sampling_params.replace(**self.evaluation.sampling)

    @property
    def has_environment(self) -> bool:
        """Whether something answers the policy between its turns."""
        return bool(self.environment.components or self.tools)

    @property
    def max_response_tokens(self) -> int:
        """The most tokens of a response, sampled or not."""
        return self.environment.max_response_tokens or self.max_generated_tokens

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of one step."""
        return self.ppo_epochs * self.num_minibatches


def contradictions(cfg: GRPOConfig) -> Iterator[str]:
    """Yield a sentence, with the remedy, for each pair of keys that contradict each other."""
    least, most = cfg.sampling.min_new_tokens, cfg.max_generated_tokens
    if least > most:
        yield f"sampling.min_new_tokens={least}: give 0 to max_generated_tokens={most}."
    prompts, parts = cfg.batch_size, cfg.num_minibatches
    if prompts % parts:
        yield f"num_minibatches={parts}: does not divide batch_size={prompts}; give a divisor."
    if (lr := cfg.optimizer.get("lr")) == 0:
        yield f"optimizer.lr={lr}: no weight would ever change; set it above 0."
    if cfg.environment.form == "inline" and not cfg.sampling.stop_strings:
        yield (
            "environment.form=inline: a stop string ends the policy's turn; set "
            "sampling.stop_strings, as to [</search>]."
        )
    tokens = cfg.environment.max_response_tokens
    if tokens is not None and tokens < cfg.max_generated_tokens:
        yield (
            f"environment.max_response_tokens={tokens}: below max_generated_tokens="
            f"{cfg.max_generated_tokens}; give at least that."
        )
    for name in ("keep_best", "stop_at"):
        value = getattr(cfg.evaluation, name)
        if value is not None and cfg.eval_dataset is None:
            yield f"evaluation.{name}={value}: needs held-out prompts; set eval_dataset."
    yield from _mistaken_folders(cfg)


def _mistaken_folders(cfg: GRPOConfig) -> Iterator[str]:
    output_dir, node = Path(cfg.output_dir).resolve(), cfg.checkpointer
    base, adapter = node.get("checkpoint_dir"), node.get("adapter_checkpoint")
    if adapter is not None:
        yield (
            f"checkpointer.adapter_checkpoint={adapter}: is not read; set it to null, and merge "
            "the adapter into its base (docs/checkpoints.md#beginning-from-an-adapter)."
        )
    if not isinstance(base, str) or not base:
        yield "checkpointer.checkpoint_dir: missing; name the folder of the base model."
    elif Path(base).resolve() == output_dir:
        yield (
            f"output_dir={cfg.output_dir}: is also checkpointer.checkpoint_dir, whose files would "
            "be overwritten; give another folder."
        )
    elif str(Path(base).resolve()).startswith(f"{output_dir}/step_"):
        yield (
            f"checkpointer.checkpoint_dir={base}: is a checkpoint in output_dir={cfg.output_dir}, "
            "from where a new run moves it; give another output_dir."
        )


def without_effect(cfg: GRPOConfig) -> Iterator[str]:
    """Yield a sentence, with the remedy, for each setting that the others switch off."""
    correction = cfg.objective.sampling_correction
    if correction in (None, "old_logprobs") and cfg.objective.correction_cap != 2.0:
        yield "objective.correction_cap: nothing is capped; set sampling_correction."
    if cfg.evaluation.every_n_steps is None and cfg.evaluation.stop_at is not None:
        yield (
            "evaluation.stop_at: a run is evaluated only at its start and end; set "
            "evaluation.every_n_steps."
        )
    greedy, as_trained = cfg.eval_sampling_params.greedy, cfg.sampling_params.greedy
    if cfg.evaluation.sampling and cfg.evaluation.samples == 0 and greedy == as_trained:
        yield "evaluation.sampling: set evaluation.samples above 0."
    if cfg.updates_per_step == 1 and correction != "old_logprobs":
        ratio = ("epsilon_low", "epsilon_high", "dual_clip", "surrogate")
        keys = ", ".join(
            f"loss.{key}" for key in ratio if cfg.loss.get(key) not in (None, "clipped")
        )
        if keys:
            yield (
                f"{keys}: with one optimizer step per rollout, every ratio is 1; set ppo_epochs or "
                "num_minibatches above 1, or objective.sampling_correction to old_logprobs."
            )
