"""From YAML to a checked config: keys, components, combinations, files, and the context."""

from __future__ import annotations

import difflib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from torch import nn
from torchtune import utils
from torchtune.config._utils import _get_component_from_path
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params
from torchtune.training.checkpointing._utils import ModelType

from torchtune_grpo.checkpoint import RUN_CONFIG_FILE, hub_name
from torchtune_grpo.config.components import (
    FLOAT32_MAX,
    check_arguments,
    component_parameters,
    instantiate,
    plain_arguments,
)
from torchtune_grpo.config.errors import Problems
from torchtune_grpo.config.files import extend_import_path
from torchtune_grpo.config.keys import (
    DynamicSamplingConfig,
    EvalSamplingConfig,
    GRPOConfig,
    ReferenceConfig,
    SamplingCorrectionConfig,
)
from torchtune_grpo.config.schema import component_keys, missing_keys, read_table
from torchtune_grpo.config.text import read_json
from torchtune_grpo.evaluation.stopping import scores
from torchtune_grpo.models import HalfRotation, adapter_files, check_adapter
from torchtune_grpo.training.lr_schedule import make_lr_scheduler
from torchtune_grpo.training.policy import empty_model

log = utils.get_logger("INFO")
T = TypeVar("T", bound=GRPOConfig)


def read_config(cfg: DictConfig, table: type[T] = GRPOConfig) -> T:  # type: ignore[assignment]
    """Checks a config before anything is loaded.

    Settings that have no effect beside the others are logged as warnings.

    Args:
        cfg (DictConfig): what ``command_line.parse`` hands to ``recipe_main``.
        table (type[T]): a subclass, where a recipe has keys of its own.

    Raises:
        ConfigError: all that is wrong, each naming the key, the value and the remedy.
    """
    problems = Problems()
    settings = examine(cfg, table, problems)
    problems.raise_any()
    assert settings is not None
    if os.environ.get("RANK", "0") == "0":
        for warning in without_effect(settings):
            log.warning(warning)
    return settings


def examine(cfg: DictConfig, table: type[T], problems: Problems) -> T | None:
    """A config as far as it can be read; None where a key without a default cannot."""
    extend_import_path()
    try:
        cfg = DictConfig(OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        if isinstance(error, InterpolationToMissingValueError) and (
            missing := missing_keys(table, cfg)
        ):
            problems += missing
            return None
        key = (error.full_key or "the config").replace("[", ".").replace("]", "")
        problems.append(f"{key}: {str(error.msg).splitlines()[0]}; correct the ${{...}}.")
        return None
    if "gradient_accumulation_steps" in cfg:
        problems.append(
            f"gradient_accumulation_steps={cfg.pop('gradient_accumulation_steps')}: unknown config "
            "key. Multiply batch_size by it instead: forward_batch_size bounds what is computed at "
            "once in the update, and rollout.max_rows in the rollout."
        )
    settings = read_table(table, cfg, problems)
    for name, node in cfg.items_ex(resolve=False):
        if isinstance(node, DictConfig) and name in component_keys(table):
            with problems.noted():
                check_component(str(name), node)
    if settings is not None:
        problems += contradictions(settings)
        problems += not_on_this_machine(settings)
    return settings


# Of a component: how many arguments the code gives it in front, and which ones by name.
_GIVEN: dict[str, tuple[int, tuple[str, ...]]] = {
    "checkpointer": (0, ("output_dir",)),
    "dataset": (1, ()),
    "eval_dataset": (1, ()),
    "sampler": (1, ("seed",)),
    "optimizer": (1, ()),
    "lr_scheduler": (1, ("num_training_steps",)),
}
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tokenizer.max_seq_len": (lambda v: v > 0, "give a number above 0"),
    "checkpointer.model_type": (
        lambda v: v in ModelType.__members__,
        f"give one of {', '.join(ModelType.__members__)}",
    ),
    "model.lora_rank": (lambda v: v > 0, "give a number above 0"),
    "model.lora_alpha": (lambda v: v > 0, "give a number above 0"),
    "model.lora_dropout": (lambda v: 0 <= v < 1, "give a share from 0, below 1"),
    "optimizer.lr": (lambda v: v >= 0, "give 0 or more"),
    "optimizer.weight_decay": (lambda v: v >= 0, "give 0 or more"),
    "lr_scheduler.num_warmup_steps": (lambda v: v >= 0, "give 0 or more"),
    "profiler.wait_steps": (lambda v: v >= 0, "give 0 or more"),
    "profiler.warmup_steps": (lambda v: v >= 0, "give 0 or more"),
    "profiler.active_steps": (lambda v: v > 0, "give a number above 0"),
    "profiler.num_cycles": (lambda v: v >= 0, "give 0 or more"),
}


def check_component(name: str, node: DictConfig) -> None:
    """A node's ``_component_`` can be imported and takes the arguments that it is given.

    Raises:
        ConfigError: naming each argument that is missing, unknown, or of a wrong type or range.
    """
    dotpath = node.get("_component_")
    if dotpath is None:
        raise ValueError(f"{name}: no _component_ given; name a class or function by its dotpath.")
    try:
        component = _get_component_from_path(dotpath)
    except Exception as error:
        raise ValueError(f"{name}._component_={dotpath}: cannot be imported: {error}") from error
    if not callable(component):
        raise ValueError(
            f"{name}._component_={dotpath}: is no class or function; name one by its dotpath."
        )
    in_front, by_name = _GIVEN.get(name, (0, ()))
    readable = component_parameters(dotpath)
    parameters = dict(list((readable or {}).items())[in_front:])
    problems = Problems(
        f"{name}.{arg}: missing; {dotpath} needs it."
        for arg, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and arg not in node
        and arg not in by_name
    )
    is_open = readable is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for arg, value in plain_arguments(node).items():
        with problems.noted():
            if arg not in parameters and not is_open:
                close = difflib.get_close_matches(arg, parameters, n=1)
                raise ValueError(
                    f"{name}.{arg}={value}: {dotpath} has no argument {arg!r}."
                    + (f" Did you mean {name}.{close[0]}?" if close else "")
                    + f" It takes {', '.join(parameters) or 'none'}."
                )
            finite = name in ("model", "optimizer", "lr_scheduler")
            check_arguments({arg: value}, parameters, prefix=f"{name}.", finite=finite)
            valid, hint = _RANGES.get(f"{name}.{arg}", (lambda _: True, ""))
            try:
                is_wrong = value is not None and not valid(value)
            except TypeError:  # of an argument without an annotation
                is_wrong = True
            if is_wrong:
                raise ValueError(f"{name}.{arg}={value!r}: {hint}.")
    problems.raise_any()


def contradictions(settings: GRPOConfig) -> list[str]:
    """One sentence for each pair of keys that contradict each other, with the remedy."""
    problems = Problems()
    with problems.noted():
        _ = settings.sampling_params  # raises if its keys contradict each other
    checkpoint_dir = settings.checkpointer.get("checkpoint_dir")
    adapter = settings.checkpointer.get("adapter_checkpoint")
    cases = {
        f"checkpointer.adapter_checkpoint={adapter}: is not read, and training would start without "
        "it; set it to null, and adapter_dir to its folder.": adapter is not None,
        f"forward_token_budget={settings.forward_token_budget}: replaces forward_batch_size="
        f"{settings.forward_batch_size}; set one of them to null.": (
            settings.forward_token_budget is not None and settings.forward_batch_size is not None
        ),
        f"num_minibatches={settings.num_minibatches}: cannot deal out batch_size="
        f"{settings.batch_size} groups evenly; give a divisor.": (
            settings.batch_size % settings.num_minibatches != 0
        ),
        "checkpointer.checkpoint_dir: missing; name the folder of the base model.": (
            checkpoint_dir is None
        ),
        f"output_dir={settings.output_dir}: is also checkpointer.checkpoint_dir, whose files would "
        "be overwritten; give another folder.": (
            isinstance(checkpoint_dir, str)
            and Path(checkpoint_dir).resolve() == Path(settings.output_dir).resolve()
        ),
    }
    low, high = settings.dynamic_sampling.min_pass_rate, settings.dynamic_sampling.max_pass_rate
    cases[
        f"dynamic_sampling.min_pass_rate={low}: above max_pass_rate={high}, no group passes; give "
        "less."
    ] = low is not None and high is not None and low > high
    for key in ("keep_best", "stop_at", "patience"):
        value, best = getattr(settings, key), scores(settings.eval_samples)
        cases[f"{key}={value}: needs evaluations; set eval_dataset to held-out prompts."] = (
            value is not None and settings.eval_dataset is None
        )
    cases[
        f"keep_best={settings.keep_best}: no evaluation with eval_samples={settings.eval_samples} "
        f"has it; give one of {', '.join(best)}, or more samples."
    ] = settings.keep_best not in (None, *best)
    for key, folder in (
        ("checkpointer.checkpoint_dir", checkpoint_dir),
        ("adapter_dir", settings.adapter_dir),
    ):
        cases[
            f"{key}={folder}: is a checkpoint in output_dir={settings.output_dir}, from where a "
            "new run moves it; give another output_dir."
        ] = isinstance(folder, str) and _is_checkpoint_in(settings.output_dir, folder)
    for number, reward in enumerate(settings.rewards):
        weight = reward.get("weight") if isinstance(reward, DictConfig) else None
        is_large = isinstance(weight, (int, float)) and abs(weight) > FLOAT32_MAX
        cases[f"rewards[{number}].weight={weight}: beyond float32; give less."] = is_large
        cases[
            f"rewards[{number}]: advantage={settings.advantage} takes no negative reward, and this "
            "one may be; change its weight or its range, or set advantage to group."
        ] = settings.advantage == "max_rl" and _may_be_negative(reward)
    return problems + [sentence for sentence, holds in cases.items() if holds]


def _may_be_negative(reward: Any) -> bool:
    """Whether a reward's weight, or the range that it declares, says so."""
    reward_range = (0.0, 1.0)
    with suppress(Exception):  # what cannot be imported is told of where it is called
        declared = _get_component_from_path(reward["_component_"])
        reward_range = getattr(declared, "reward_range", reward_range)
    weight = reward.get("weight", 1.0) if isinstance(reward, DictConfig) else 1.0
    return isinstance(weight, (int, float)) and any(weight * end < 0 for end in reward_range)


def _is_checkpoint_in(output_dir: str, folder: str) -> bool:
    """Whether a folder is a checkpoint of a run in ``output_dir``, or lies in one."""
    home, path = Path(output_dir).resolve(), Path(folder).resolve()
    return any(p.parent == home and p.name.startswith("step_") for p in (path, *path.parents))


def check_device(name: str, device: str, *, probe: bool) -> None:
    """Raises a ValueError for a device that torch does not know or, to probe it, has not here."""
    try:
        if probe or torch.device(device).type != "cuda":
            torch.empty(0, device=device)
        usable = device != "meta"
    except (RuntimeError, AssertionError, NotImplementedError):
        usable = False
    if not usable:
        raise ValueError(f"{name}={device}: no such device here; give cuda or cpu, say.")


def not_on_this_machine(settings: GRPOConfig) -> list[str]:
    """One sentence for an unknown device, and for a folder that cannot be written to.

    Whether there is a GPU is asked later: a config is read on other machines, too.
    """
    problems = Problems()
    with problems.noted():
        check_device("device", settings.device, probe=False)
    if settings.reference.device is not None:
        with problems.noted():
            check_device("reference.device", settings.reference.device, probe=False)
    folders = {"output_dir": settings.output_dir}
    log_dir = str(settings.metric_logger.get("log_dir") or settings.output_dir)
    if not Path(log_dir).is_relative_to(settings.output_dir):
        folders["metric_logger.log_dir"] = log_dir
    for name, folder in folders.items():
        if os.environ.get("RANK", "0") != "0":
            break  # only the first rank writes
        path = Path(folder).absolute()
        try:
            there = next(parent for parent in (path, *path.parents) if parent.exists())
            tempfile.TemporaryFile(dir=there).close()  # also as root; it has no name and is gone
        except OSError as error:
            problems.append(f"{name}={folder}: cannot be written to: {error}; give another folder.")
    return problems


# Of the shipped loss, keys that act on the ratio of the current policy to the one that sampled.
_OF_THE_RATIO = {
    "importance_sampling_level": "token",
    "surrogate": "clipped",
    **dict.fromkeys(("epsilon_low", "epsilon_high", "dual_clip")),
}


def _idle_at_ratio_one(settings: GRPOConfig) -> list[str]:
    """Keys of the loss that do nothing where each rollout makes one optimizer step."""
    mode = settings.sampling_correction.mode
    is_ours = settings.loss.get("_component_") == "torchtune_grpo.loss.GRPOLoss"
    if settings.updates_per_step > 1 or mode == "old_logprobs" or not is_ours:
        return []
    keys = dict(_OF_THE_RATIO)
    if mode in ("token_truncate", "token_mask"):  # a row's tokens share their weights then
        del keys["importance_sampling_level"]
    found = {key: settings.loss.get(key, default) for key, default in keys.items()}
    return [f"loss.{key}={found[key]}" for key, default in keys.items() if found[key] != default]


def without_effect(settings: GRPOConfig) -> list[str]:
    """One sentence for each setting that the others switch off, with the remedy."""
    idle = ", ".join(_idle_at_ratio_one(settings))
    own_sampling = settings.eval_sampling != EvalSamplingConfig()
    mode, cap = settings.sampling_correction.mode, settings.sampling_correction.cap
    cases = {
        f"sampling_correction.cap={cap}: nothing is capped under mode={mode}; set mode to "
        "token_truncate, say.": (
            mode in (None, "old_logprobs") and cap != SamplingCorrectionConfig().cap
        ),
        "stop_at and patience: without eval_every_n_steps a run is evaluated at its end; set it.": (
            settings.eval_every_n_steps is None
            and (settings.stop_at, settings.patience) != (None, None)
        ),
        "reference: there is none with loss.kl_coeff=0; remove the node.": (
            settings.loss.get("kl_coeff") == 0 and settings.reference != ReferenceConfig()
        ),
        "reference.policy=base: without adapter_dir, training starts from the base; remove it.": (
            settings.reference.policy == "base" and settings.adapter_dir is None
        ),
        f"{idle}: with one optimizer step per rollout, every ratio is 1; set ppo_epochs or "
        "num_minibatches above 1, or sampling_correction.mode to old_logprobs.": bool(idle),
        "dynamic_sampling: no group is replaced with max_resamples=0; set that above 0.": (
            settings.dynamic_sampling != DynamicSamplingConfig()
            and settings.dynamic_sampling.max_resamples == 0
        ),
        "eval_sampling: nothing is sampled with eval_samples=0; set that above 0.": (
            own_sampling and settings.eval_samples == 0
        ),
    }
    return [f"No effect: {sentence}" for sentence, holds in cases.items() if holds]


# What config.json says of the weights -> a builder's argument, and the same of a built model.
_SHAPE: dict[str, tuple[str, Callable[[Any], int]]] = {
    "vocab_size": ("vocab_size", lambda model: model.tok_embeddings.num_embeddings),
    "hidden_size": ("embed_dim", lambda model: model.tok_embeddings.embedding_dim),
    "num_hidden_layers": ("num_layers", lambda model: len(model.layers)),
    "num_attention_heads": ("num_heads", lambda model: model.layers[0].attn.num_heads),
    "num_key_value_heads": ("num_kv_heads", lambda model: model.layers[0].attn.num_kv_heads),
    "intermediate_size": (
        "intermediate_dim",
        lambda model: model.layers[0].mlp.w1.weight.shape[0],
    ),
}
# Models whose weights torchtune converts in a way of their own: model_type here -> in config.json.
_OWN_FORMAT = {
    **{"QWEN2": "qwen2", "GEMMA2": "gemma2", "PHI3_MINI": "phi3", "PHI4": "phi3"},
    **{"CLIP_TEXT": "clip_text_model", "T5_ENCODER": "t5", "LLAMA3_VISION": "mllama"},
}


def check_checkpoint_files(settings: GRPOConfig) -> None:
    """Checks the files named in the config, and makes on trial what can be without weights.

    The model is built without memory and compared with the checkpoint's ``config.json``; optimizer
    and schedule get one small parameter, and take no step, which some optimizers would compile.

    Raises:
        ConfigError: naming each key, if a file is missing, or a component cannot be made.
    """
    problems = Problems()
    if settings.reference.device is not None:
        with problems.noted():
            check_device("reference.device", settings.reference.device, probe=True)
    with problems.noted():
        _check_model(settings, _check_files(settings))
    with problems.noted():
        optimizer = instantiate("optimizer", settings.optimizer, [nn.Parameter(torch.zeros(2, 2))])
        make_lr_scheduler(settings, optimizer)
    problems[:] = [by_model_dir(settings, problem) for problem in problems]
    problems.raise_any()


def by_model_dir(settings: GRPOConfig, problem: str) -> str:
    """The same sentence, but of the key ``model_dir`` where a node has its folder from there."""
    key, _, rest = problem.partition("=")
    name = key.rpartition(".")[2]
    if name in ("checkpoint_dir", "model_dir") and rest.startswith(f"{settings.model_dir}:"):
        return f"model_dir={rest}"
    return problem


def _check_files(settings: GRPOConfig) -> dict[str, Any]:
    """Raises a ValueError for a file that is not there; returns the content of config.json."""
    node = settings.checkpointer
    folder = Path(node.checkpoint_dir)
    download = f"`tune download <model> --output-dir {folder}` fetches a model from the hub"
    if not folder.is_dir():
        raise ValueError(f"checkpointer.checkpoint_dir={folder}: no such folder; {download}.")
    if node.get("checkpoint_files") is None:  # the checkpointer finds them
        instantiate("checkpointer", node, output_dir=settings.output_dir)
        names = []
    else:
        names = _checkpoint_files(node.checkpoint_files, download)
    present = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"checkpointer.checkpoint_dir={folder}: holds no config.json, but {present}; "
            f"{download}."
        )
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(
                f"checkpointer.checkpoint_files: {folder / name} is missing; the folder holds "
                f"{present}. Name the files that are there; {download}."
            )
    for name in ("path", "merges_file", "special_tokens_path"):
        path = settings.tokenizer.get(name)
        if path is not None and not Path(path).is_file():
            raise ValueError(f"tokenizer.{name}={path}: no such file; {download}.")
    return read_json(folder, "config.json", key="checkpointer.checkpoint_dir")


def _checkpoint_files(files: Any, download: str) -> list[str]:
    """The names that torchtune's checkpointers make of their key."""
    try:
        if OmegaConf.is_dict(files):
            last = str(files.max_filename)
            names = [
                files.filename_format.format(str(i + 1).zfill(len(last)), last)
                for i in range(int(last))
            ]
        else:
            names = list(map(str, files))
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"checkpointer.checkpoint_files={files}: {error}; give a list of names, or "
            "filename_format and max_filename."
        ) from error
    if not names:
        raise ValueError(f"checkpointer.checkpoint_files={files}: names no file; {download}.")
    return names


def _check_model(settings: GRPOConfig, hf_config: Mapping[str, Any]) -> None:
    """Raises a ValueError if the model cannot be built, or is not that of the checkpoint."""
    folder, ours = settings.checkpointer.checkpoint_dir, settings.checkpointer.get("model_type")
    theirs = hf_config.get("model_type")
    is_own = ours in _OWN_FORMAT or theirs in _OWN_FORMAT.values()
    if ours is not None and theirs is not None and is_own and _OWN_FORMAT.get(ours) != theirs:
        raise ValueError(
            f"checkpointer.model_type={ours}: config.json in {folder} says {theirs}; give the "
            "type of that model."
        )
    model = empty_model(settings)
    if not isinstance(model, TransformerDecoder):
        raise ValueError(
            f"model._component_={settings.model._component_}: makes a {type(model).__name__}; only "
            "text models (torchtune's TransformerDecoder) can be trained."
        )
    by_halves = any(isinstance(module, HalfRotation) for module in model.modules())
    if by_halves != (ours is None):
        fitting = (
            "torchtune_grpo.models.HFCheckpointer" if by_halves else "torchtune's checkpointer"
        )
        raise ValueError(
            f"checkpointer._component_={settings.checkpointer._component_}: gives the weights of "
            "queries and keys in another order than "
            f"model._component_={settings.model._component_} takes them; set it to {fitting}."
        )
    if any(type(module).__name__ == "Gemma2Attention" for module in model.modules()):
        raise ValueError(
            f"model._component_={settings.model._component_}: torchtune 0.6.1 computes another "
            "model than Gemma 2's weights are for (its norms around the feed-forward are swapped, "
            "and logits are capped before the output projection); train another model."
        )
    for name, (argument, shape) in _SHAPE.items():
        with suppress(AttributeError, IndexError):  # a model of another layout
            built, wanted = shape(model), hf_config.get(name)
            if wanted not in (None, built):
                at_fault = argument if argument in settings.model else "_component_"
                raise ValueError(
                    f"model.{at_fault}={settings.model[at_fault]}: the model's {name} is {built}, "
                    f"but config.json in {folder} says {wanted}. Build the model that was "
                    "downloaded."
                )
    suppressed, size = settings.sampling.suppressed_tokens, model.tok_embeddings.num_embeddings
    if any(token >= size for token in suppressed):
        raise ValueError(
            f"sampling.suppressed_tokens={list(suppressed)}: the model's vocabulary has {size} "
            f"tokens; give numbers from 0 to {size - 1}."
        )
    has_adapters, reference = bool(get_adapter_params(model)), settings.reference
    if has_adapters and replace(reference, policy="start") != ReferenceConfig():
        no_copy = "No effect: reference: the adapters are switched off, no weights are copied."
        utils.log_rank_zero(log, no_copy)
    if settings.adapter_dir is not None:
        _check_adapter(settings.adapter_dir, model, base=Path(folder))
        if reference.policy == "base" and not has_adapters:
            raise ValueError(
                "reference.policy=base: adapter_dir is merged into a model without adapters, which "
                "cannot be switched off; set it to start, or train adapters."
            )


def _check_adapter(adapter_dir: str, model: nn.Module, *, base: Path) -> None:
    file, base = adapter_files(adapter_dir)[0].resolve(), base.resolve()
    place, here = file.parent, hub_name(base)
    if place == base or (base in place.parents and (base / RUN_CONFIG_FILE).is_file()):
        raise ValueError(
            f"adapter_dir={adapter_dir}: the weights in checkpointer.checkpoint_dir={base} hold "
            "this adapter already; set it to null, or give the base that it was trained on."
        )
    check_adapter(adapter_dir, model)
    theirs = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if theirs and here and theirs != here and not Path(theirs).exists():
        told = (
            f"adapter_dir={adapter_dir}: was trained on {theirs}, and checkpointer.checkpoint_dir="
        )
        utils.log_rank_zero(log, f"{told}{base} holds {here}.", level=logging.WARNING)


def check_vocabulary(settings: GRPOConfig, *, highest_tokens: Mapping[str, int]) -> None:
    """Raises a ValueError if a prompt has a token that the model has no embedding for.

    ``highest_tokens`` has the highest id of each data set, by its key.
    """
    size = empty_model(settings).tok_embeddings.num_embeddings
    for name, highest in highest_tokens.items():
        if highest >= size:
            raise ValueError(
                f"tokenizer: writes prompts of {name} with the token {highest}, but the model's "
                f"vocabulary has {size} tokens. Give the model's own tokenizer, or resize the "
                "model's embeddings with transformers (resize_token_embeddings)."
            )


def check_lengths(settings: GRPOConfig, *, longest_prompts: Mapping[str, int]) -> None:
    """Raises a ValueError if a prompt and its response are too long for model or budget.

    ``longest_prompts`` has the longest prompt in tokens of each data set, by its key.
    """
    context = empty_model(settings).max_seq_len
    response = settings.max_generated_tokens
    for name, longest in longest_prompts.items():
        remedies = {
            "give at most": context - longest,
            f"set {name}.max_prompt_tokens to at most": context - response,
        }
        if longest + response > context:
            advice = ", or ".join(f"{do} {limit}" for do, limit in remedies.items() if limit > 0)
            raise ValueError(
                f"max_generated_tokens={response}: with the longest prompt of {name}, {longest} "
                f"tokens, it exceeds the model's context of {context}; {advice}."
            )
    budget = settings.forward_token_budget
    row = longest_prompts.get("dataset", 0) + response - 1  # the last token is not read
    if budget is not None and row > budget:
        raise ValueError(
            f"forward_token_budget={budget}: the longest prompt of {longest_prompts['dataset']} "
            f"tokens with max_generated_tokens={response} makes a row of {row}; give at least "
            f"{row}, or lower dataset.max_prompt_tokens or max_generated_tokens."
        )
