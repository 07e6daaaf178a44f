"""The recipes' config keys: one table of names, types, defaults and meanings, checked when read.

``read_config`` turns the OmegaConf config into a :class:`GRPOConfig`, before anything is loaded. An
unknown key is an error with the nearest valid name, never a silent default. ``python -m
torchtune_grpo.config`` prints the table as Markdown.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_grpo._import_path import extend_import_path
from torchtune_grpo.advantages import NORMALIZATIONS, OBJECTIVES
from torchtune_grpo.importance import CORRECTIONS
from torchtune_grpo.logprobs._packed_attention import PACKED_ATTENTION
from torchtune_grpo.read_config import (
    check_combinations,
    check_components,
    component_parameters,
)
from torchtune_grpo.rollout import (
    ENGINES,
    GATHER_CHOICES,
    MERGE_CHOICES,
    SamplingParams,
)


def key(
    doc: str, default: Any = MISSING, *, valid: Callable[[Any], bool] | None = None, hint: str = ""
) -> Any:
    """Declares a config key: its meaning, its default, what values it takes and the remedy."""
    metadata = {"doc": doc, "valid": valid, "hint": hint}
    return field(default=default, metadata=metadata)


def positive(doc: str, default: Any = MISSING) -> Any:
    """Declares a key that takes a number above 0 (or null where its type allows it)."""
    return key(doc, default, valid=lambda v: v is None or v > 0, hint="give a number above 0")


def one_of(doc: str, default: str | None, options: tuple[str, ...]) -> Any:
    """Declares a key that takes one of some words (or null where its type allows it)."""
    words = ", ".join(options)
    return key(
        f"{doc} ({words})",
        default,
        valid=lambda v: v is None or v in options,
        hint=f"give one of {words}",
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The keys below ``rollout``: how the responses are generated, not what is sampled."""

    engine: str = one_of("Generation engine; see docs/rollout.md", "native", ENGINES)
    max_rows: int | None = positive(
        "Most responses worked on at once; null = batch_size * grpo_samples", None
    )
    merge_adapters: str = one_of(
        "Add adapters to a copy of the weights for a rollout; auto = where exact and memory allows",
        "auto",
        MERGE_CHOICES,
    )
    gather: str = one_of(
        "Distributed: a sharded model is gathered once a rollout, or layer by layer for each "
        "token; auto = once if it takes at most half of a rank's free memory",
        "auto",
        GATHER_CHOICES,
    )
    cuda_graphs: bool = key(
        "CUDA: record decoding steps in graphs and replay them, which spares their launches", False
    )
    deadline: float | None = positive(
        "Seconds after which a rollout cuts its responses where they are; null = none", None
    )


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Every key that the GRPO recipes read. Nodes hold ``_component_`` and its arguments."""

    # What is trained, on what
    output_dir: str = key("Folder for checkpoints, metrics and completions")
    prepare: DictConfig | None = key(
        "Component called before anything is read, to make what is missing", None
    )
    tokenizer: DictConfig = key("Component: the torchtune tokenizer")
    checkpointer: DictConfig = key("Component: torchtune's HF checkpointer")
    model: DictConfig = key("Component: a torchtune model builder; LoRA, QLoRA, DoRA or full")
    dataset: DictConfig = key("Component: prompts to train on, called with the tokenizer")
    rewards: ListConfig = key(
        "List of components with `name`, `weight` and arguments; see docs/rewards.md"
    )
    max_reward_failure_share: float = key(
        "Stop if a reward fails on more of a step's completions than this share",
        0.25,
        valid=lambda v: 0 <= v <= 1,
        hint="give a share from 0 to 1",
    )
    loss: DictConfig = key("Component: the loss")
    reference_dtype: str | None = key(
        "Full fine-tuning: dtype of the frozen reference; null = `dtype`", None
    )
    reference_device: str | None = key(
        "Full fine-tuning: device of the frozen reference; null = `device`", None
    )
    # Rollout
    batch_size: int = positive("Prompts rolled out at once")
    grpo_samples: int = key(
        "Samples in a group (G)",
        valid=lambda v: v >= 2,
        hint="a group of one has no spread to learn from; give at least 2",
    )
    max_generated_tokens: int = positive("Longest response in tokens")
    temperature: float = positive("Sampling temperature", 1.0)
    top_k: int | None = positive("Sample among the k most likely tokens; null = all", None)
    top_p: float | None = key(
        "Sample within this probability mass; null = all",
        None,
        valid=lambda v: v is None or 0 < v <= 1,
        hint="give a number in (0, 1], or null",
    )
    min_p: float | None = key(
        "Leave out tokens less likely than this share of the likeliest; null = none",
        None,
        valid=lambda v: v is None or 0 <= v <= 1,
        hint="give a number in [0, 1], or null",
    )
    repetition_penalty: float = positive(
        "Above 1: tokens of prompt and response so far become less likely", 1.0
    )
    min_new_tokens: int = key(
        "No stop token and no stop string before so many tokens",
        0,
        valid=lambda v: v >= 0,
        hint="give 0 or more",
    )
    suppressed_tokens: ListConfig | None = key("Token ids that are never sampled", None)
    stop_strings: ListConfig | None = key("Texts that also end a response", None)
    rollout: RolloutConfig = key("How responses are generated", RolloutConfig())
    # Objective
    advantage: str = one_of(
        "Baseline and scale of an advantage; see docs/objectives.md", "group", NORMALIZATIONS
    )
    objectives: str = one_of(
        "Whether several rewards are summed or normalized first", "sum_then_normalize", OBJECTIVES
    )
    mask_truncated_completions: bool = key(
        "Do not train on responses without a stop token (their rewards still count)", False
    )
    sampling_correction: str | None = one_of(
        "Importance weights for the gap between sampler and trainer; null = none",
        None,
        CORRECTIONS,
    )
    sampling_correction_cap: float = key(
        "Largest such weight", 2.0, valid=lambda v: v > 1, hint="give a number above 1"
    )
    # Optimization
    num_steps: int = positive("Steps of roll-out and update")
    gradient_accumulation_steps: int = positive("Batches of prompts in one step", 1)
    ppo_epochs: int = positive("Optimizer steps on each step's samples (the paper's mu)", 1)
    old_logprobs: str = one_of(
        "Log-probs of the policy that sampled, in the ratio: as computed here, or as reported",
        "trainer",
        ("trainer", "sampler"),
    )
    forward_batch_size: int | None = positive(
        "Rows in a forward and backward pass; null = a whole batch", None
    )
    forward_token_budget: int | None = positive(
        "Tokens in a forward and backward pass, padding included, instead of forward_batch_size",
        None,
    )
    pack_groups: bool = key(
        "Compute a group's prompt once, where forward_batch_size holds whole groups or the budget "
        "several rows",
        True,
    )
    packed_attention: str = one_of(
        "How packed groups attend: each response by itself, with a dense mask, or (CUDA) with flex "
        "attention; auto = segments, or dense where layers are compiled",
        "auto",
        ("auto", *PACKED_ATTENTION),
    )
    optimizer: DictConfig = key("Component: a torch, torchao or bitsandbytes optimizer")
    lr_scheduler: DictConfig | None = key(
        "Component: torchtune's learning-rate schedule; null = constant", None
    )
    clip_grad_norm: float | None = positive("Largest gradient norm; null = no clipping", None)
    max_nonfinite_steps: int = positive(
        "Stop after so many optimizer steps in a row were skipped for a loss or gradient that is "
        "not finite",
        3,
    )
    # Machine
    device: str = key("cuda, cpu, ...", "cuda")
    dtype: str = key(
        "bf16 or fp32", "bf16", valid=lambda v: v in ("bf16", "fp32"), hint="give bf16 or fp32"
    )
    sharding: str = one_of(
        "Distributed: spread the model over the ranks (FSDP2); auto = if all of it is trained, or "
        "if it takes more than half of a rank's free memory",
        "auto",
        ("auto", "always", "never"),
    )
    data_parallel_replicate_dim: int = positive(
        "Distributed: copies of a sharded model, each over a part of the ranks (HSDP)", 1
    )
    fsdp_cpu_offload: bool = key(
        "Distributed: keep a sharded model's parts on the CPU while they wait", False
    )
    fsdp_defer_gradients: str = one_of(
        "Distributed: a sharded model's gradients cross the wire once a step, not once a "
        "micro-batch, and are held whole meanwhile; auto = with adapters",
        "auto",
        ("auto", "always", "never"),
    )
    seed: int = key("Seed of the prompts' order, the sampler and everything else", 0)
    compile: bool = key("Compile the layers for the log-prob and update passes", False)
    enable_activation_checkpointing: bool = key("Recompute activations: less memory", False)
    # Evaluation
    eval_dataset: DictConfig | None = key("Component: held-out prompts; null = no evaluation", None)
    eval_every_n_steps: int | None = positive("Evaluate every n steps; null = start and end", None)
    eval_samples: int = key(
        "Also sample n responses a prompt at `temperature` for pass@1; 0 = greedy only",
        0,
        valid=lambda v: v >= 0,
        hint="give 0 or more",
    )
    eval_reward: str | None = key("Reward that decides accuracy; null = the first", None)
    # Checkpoints
    save_every_n_steps: int | None = positive("Save every n steps; null = only at the end", None)
    keep_last_n_checkpoints: int | None = positive(
        "Delete older checkpoints; null = keep all", None
    )
    save_adapter_weights_only: bool = key("Leave out the merged weights", False)
    resume_from_checkpoint: bool = key("Continue from the newest checkpoint in output_dir", False)
    # Logging
    metric_logger: DictConfig = key("Component: torchtune's Disk, TensorBoard or W&B logger")
    log_every_n_steps: int = positive("Log metrics every n steps", 1)
    log_completions: int = key(
        "Completions of each logged step kept in completions.jsonl; 0 = none",
        8,
        valid=lambda v: v >= 0,
        hint="give 0 or more",
    )
    log_peak_memory_stats: bool = key("Log peak memory (CUDA)", False)
    profiler: DictConfig | None = key("Component: torchtune.training.setup_torch_profiler", None)

    @property
    def sampling(self) -> SamplingParams:
        """How responses are sampled."""
        return SamplingParams(
            max_generated_tokens=self.max_generated_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_new_tokens=self.min_new_tokens,
            suppressed_tokens=tuple(self.suppressed_tokens or ()),
            stop_strings=tuple(self.stop_strings or ()),
        )

    @property
    def max_rollout_rows(self) -> int:
        """Most responses worked on at once."""
        return self.rollout.max_rows or self.batch_size * self.grpo_samples

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one step on this rank."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def rows_per_forward(self) -> int:
        """Rows of one forward pass."""
        return self.forward_batch_size or self.batch_size * self.grpo_samples

    @property
    def attention(self) -> str:
        """How packed groups attend, with ``auto`` decided."""
        if self.packed_attention != "auto":
            return self.packed_attention
        return "dense" if self.compile else "segments"


def read_config(cfg: DictConfig) -> GRPOConfig:
    """Checks a config and returns it as a :class:`GRPOConfig`.

    Args:
        cfg (DictConfig): what ``torchtune.config.parse`` hands to ``recipe_main``.

    Returns:
        GRPOConfig: the checked config.

    Raises:
        ValueError: naming the key, the value and the remedy.
    """
    extend_import_path()
    cfg = DictConfig(OmegaConf.to_container(cfg, resolve=True))
    settings: GRPOConfig = _read(GRPOConfig, cfg)
    check_components(settings)
    check_combinations(settings)
    return settings


def _read(table: type, cfg: DictConfig, prefix: str = "") -> Any:
    """One mapping of the config as the dataclass ``table``."""
    fields = {f.name: f for f in dataclasses.fields(table)}
    for name in map(str, cfg):
        if name not in fields:
            raise ValueError(
                f"{prefix}{name}={cfg[name]}: unknown config key."
                f"{_nearest(name, fields, cfg, prefix=prefix)}"
            )
    hints = typing.get_type_hints(table)
    values = {}
    for name, f in fields.items():
        if name not in cfg or OmegaConf.is_missing(cfg, name):
            if f.default is MISSING:
                raise ValueError(
                    f"{prefix}{name}: missing from the config. It is: {f.metadata['doc']}."
                )
            continue
        value = cfg[name]
        if isinstance(value, DictConfig) and value.get("_component_", "") is None:
            value = None  # what `key=null` on the command line makes of a component
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, DictConfig):
            values[name] = _read(hints[name], value, prefix=f"{prefix}{name}.")
        else:
            values[name] = _checked(prefix + name, value, hints[name], f.metadata)
    return table(**values)


def _nearest(name: str, fields: Iterable[str], cfg: DictConfig, *, prefix: str) -> str:
    nested = [
        f"{node}.{arg}"
        for node, value in cfg.items()
        if isinstance(value, Mapping)
        for arg in component_parameters(value.get("_component_"))
        if arg == name
    ]
    close = nested or difflib.get_close_matches(name, list(fields), n=1)
    valid = "`python -m torchtune_grpo.config` lists the keys."
    return f" Did you mean {prefix}{close[0]}? {valid}" if close else f" {valid}"


def _checked(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in options and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 1e-4 as a string and 1 as an integer
            value = float(value)
        except ValueError:
            pass
    wrong_bool = isinstance(value, bool) and bool not in options
    if wrong_bool or not isinstance(value, options):
        wanted = " or ".join("null" if o is type(None) else o.__name__ for o in options)
        wanted = wanted.replace("DictConfig", "a mapping with _component_")
        raise ValueError(f"{name}={value!r}: not of type {wanted}.{_meaning(metadata)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value}: not a finite number.{_meaning(metadata)}")
    if metadata["valid"] is not None and not metadata["valid"](value):
        raise ValueError(f"{name}={value}: {metadata['hint']}.{_meaning(metadata)}")
    return value


def _meaning(metadata: Mapping[str, Any]) -> str:
    return f" It is: {metadata['doc']}."


def markdown_table() -> str:
    """The keys as a Markdown table."""
    lines = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    return "\n".join(lines + _table_lines(GRPOConfig))


def _table_lines(table: type, prefix: str = "") -> list[str]:
    hints = typing.get_type_hints(table)
    lines = []
    for f in dataclasses.fields(table):
        if dataclasses.is_dataclass(hints[f.name]):
            lines += _table_lines(hints[f.name], prefix=f"{prefix}{f.name}.")
            continue
        options = typing.get_args(hints[f.name]) or (hints[f.name],)
        names = ["null" if o is type(None) else o.__name__ for o in options]
        kind = " or ".join(
            {"DictConfig": "component", "ListConfig": "list"}.get(n, n) for n in names
        )
        default = (
            "required" if f.default is MISSING else OmegaConf.to_yaml({"x": f.default})[3:].strip()
        )
        lines.append(f"| `{prefix}{f.name}` | {kind} | {default} | {f.metadata['doc']} |")
    return lines


if __name__ == "__main__":
    print(markdown_table())
