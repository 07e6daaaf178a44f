"""From YAML to a checked config: keys, components, combinations, files, and the context."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, utils
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo._config_table import component_parameters, read_table
from torchtune_grpo._import_path import extend_import_path
from torchtune_grpo.config import GRPOConfig, ReferenceConfig, SamplingCorrectionConfig

log = utils.get_logger("INFO")


def read_config(cfg: DictConfig) -> GRPOConfig:
    """Checks what ``torchtune.config.parse`` hands to ``recipe_main``, before anything is loaded.

    Settings that have no effect beside the others are logged as warnings.

    Raises:
        ValueError: naming the key, the value and the remedy.
    """
    extend_import_path()
    if "gradient_accumulation_steps" in cfg:
        raise ValueError(
            f"gradient_accumulation_steps={cfg.gradient_accumulation_steps}: unknown config key. "
            "Multiply batch_size by it instead: forward_batch_size bounds what is computed at once "
            "in the update, and rollout.max_rows in the rollout."
        )
    cfg = DictConfig(OmegaConf.to_container(cfg, resolve=True))
    settings: GRPOConfig = read_table(GRPOConfig, cfg)
    check_components(settings)
    check_combinations(settings)
    if os.environ.get("RANK", "0") == "0":
        for warning in without_effect(settings):
            log.warning(warning)
    rows = settings.rollout.max_rows or settings.rows_per_step  # also where more are evaluated
    return replace(settings, rollout=replace(settings.rollout, max_rows=rows))


def check_components(settings: GRPOConfig) -> None:
    """Every ``_component_`` can be imported and takes the arguments that it is given."""
    for name, node in vars(settings).items():
        if not isinstance(node, DictConfig):
            continue
        dotpath = node.get("_component_")
        if dotpath is None:
            raise ValueError(
                f"{name}: no _component_ given; name a class or function by its dotpath."
            )
        try:
            _get_component_from_path(dotpath)
        except Exception as error:
            raise ValueError(
                f"{name}._component_={dotpath}: cannot be imported: {error}"
            ) from error
        parameters = component_parameters(dotpath)
        if name in ("model", "loss", "tokenizer", "prepare"):  # the others get arguments in code
            for arg, parameter in parameters.items():
                needed = parameter.default is parameter.empty and parameter.kind in (
                    parameter.POSITIONAL_OR_KEYWORD,
                    parameter.KEYWORD_ONLY,
                )
                if needed and arg not in node:
                    raise ValueError(f"{name}.{arg}: missing; {dotpath} needs it.")
        if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for arg in node:
            if arg != "_component_" and arg not in parameters:
                close = difflib.get_close_matches(arg, parameters, n=1)
                raise ValueError(
                    f"{name}.{arg}={node[arg]}: {dotpath} has no argument {arg!r}."
                    + (f" Did you mean {name}.{close[0]}?" if close else "")
                    + f" It takes {', '.join(parameters)}."
                )


def check_combinations(settings: GRPOConfig) -> None:
    """Raises a ValueError where keys contradict each other."""
    _ = settings.sampling_params  # raises if its keys contradict each other
    if settings.rows_per_step % settings.rows_per_forward:
        rows = settings.rows_per_step
        raise ValueError(
            f"forward_batch_size={settings.forward_batch_size}: does not divide the "
            f"batch_size * grpo_samples = {rows} rows of a step; give a divisor of {rows}."
        )
    if settings.forward_token_budget is not None and settings.forward_batch_size is not None:
        raise ValueError(
            f"forward_token_budget={settings.forward_token_budget}: replaces forward_batch_size="
            f"{settings.forward_batch_size}; set one of them to null."
        )
    if settings.rollout.cuda_graphs and not settings.device.startswith("cuda"):
        raise ValueError(
            f"rollout.cuda_graphs=True: works on CUDA, not on device={settings.device}; set it to "
            "false."
        )
    if settings.rollout.cuda_graphs and settings.distributed.gather == "layer":
        raise ValueError(
            "rollout.cuda_graphs=True: layers gathered for each token cannot be recorded; set it "
            "to false, or distributed.gather to once."
        )
    if settings.eval_dataset is None and settings.eval_every_n_steps is not None:
        raise ValueError(
            f"eval_every_n_steps={settings.eval_every_n_steps}: there is no eval_dataset to "
            "evaluate on; add one, or set eval_every_n_steps to null."
        )
    checkpoint_dir = settings.checkpointer.get("checkpoint_dir")
    if checkpoint_dir is None:
        raise ValueError("checkpointer.checkpoint_dir: missing; name the folder of the base model.")
    if Path(checkpoint_dir).resolve() == Path(settings.output_dir).resolve():
        raise ValueError(
            f"output_dir={settings.output_dir}: is also checkpointer.checkpoint_dir, whose files "
            "would be overwritten; give another folder."
        )


def without_effect(settings: GRPOConfig) -> list[str]:
    """One sentence for each setting that the others switch off, with the remedy."""
    group, rows = settings.grpo_samples, settings.rows_per_forward
    no_budget = settings.forward_token_budget is None
    mode, cap = settings.sampling_correction.mode, settings.sampling_correction.cap
    cases = {
        f"pack_groups=True: forward_batch_size={rows} holds no whole groups; make it a multiple of "
        f"grpo_samples={group}, or give forward_token_budget instead.": (
            settings.pack_groups and no_budget and rows % group > 0
        ),
        f"sampling_correction.cap={cap}: nothing is capped under mode={mode}; set mode to "
        "token_truncate, say.": (
            mode in (None, "old_logprobs") and cap != SamplingCorrectionConfig().cap
        ),
        "reference: there is none with loss.kl_coeff=0; remove the node.": (
            settings.loss.get("kl_coeff") == 0 and settings.reference != ReferenceConfig()
        ),
        f"eval_samples={settings.eval_samples}: there is no eval_dataset; add one.": (
            settings.eval_dataset is None and settings.eval_samples > 0
        ),
    }
    return [f"No effect: {sentence}" for sentence, holds in cases.items() if holds]


def check_checkpoint_files(settings: GRPOConfig) -> None:
    """Raises a ValueError if the checkpoint or tokenizer files named in the config are missing."""
    node = settings.checkpointer
    folder = Path(node.checkpoint_dir)
    download = f"`tune download <model> --output-dir {folder}` fetches a model from the hub"
    if not folder.is_dir():
        raise ValueError(f"checkpointer.checkpoint_dir={folder}: no such folder; {download}.")
    files = node.checkpoint_files
    if OmegaConf.is_dict(files):
        last = str(files.max_filename)
        names = [
            files.filename_format.format(str(i + 1).zfill(len(last)), last)
            for i in range(int(last))
        ]
    else:
        names = list(files)
    for name in [*names, "config.json"]:
        if not (folder / name).is_file():
            present = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
            raise ValueError(
                f"checkpointer.checkpoint_files: {folder / name} is missing; the folder holds "
                f"{present}. Name the files that are there; {download}."
            )
    for name in ("path", "merges_file"):
        path = settings.tokenizer.get(name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"tokenizer.{name}={path}: no such file; {download}.")


def check_lengths(settings: GRPOConfig, *, longest_prompts: Mapping[str, int]) -> None:
    """Raises a ValueError if a prompt and its response are too long for model or budget.

    ``longest_prompts`` has the longest prompt in tokens of each data set, by its key.
    """
    with torch.device("meta"):  # no weights are made
        context = config.instantiate(settings.model).max_seq_len
    response = settings.max_generated_tokens
    for name, longest in longest_prompts.items():
        if longest + response > context:
            raise ValueError(
                f"{name}: the longest prompt has {longest} tokens, which with max_generated_tokens="
                f"{response} exceeds the model's context of {context}. Set "
                f"{name}.max_prompt_tokens to at most {context - response}, or lower "
                "max_generated_tokens."
            )
    budget = settings.forward_token_budget
    row = longest_prompts["dataset"] + response - 1  # the last token is not read
    if budget is not None and row > budget:
        raise ValueError(
            f"forward_token_budget={budget}: the longest prompt of {longest_prompts['dataset']} "
            f"tokens with max_generated_tokens={response} makes a row of {row}; give at least "
            f"{row}, or lower dataset.max_prompt_tokens or max_generated_tokens."
        )
