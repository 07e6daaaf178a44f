"""Checks of a config beyond single keys: components, combinations, files, and the context."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

if TYPE_CHECKING:
    from torchtune_grpo.config import GRPOConfig


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


def component_parameters(dotpath: str | None) -> dict[str, inspect.Parameter]:
    """Parameters of a component; empty where it cannot be found or does not say."""
    try:
        return dict(inspect.signature(_get_component_from_path(dotpath or "")).parameters)
    except (InstantiationError, ValueError, TypeError):
        return {}


def check_combinations(settings: GRPOConfig) -> None:
    """Contradictions between keys."""
    _ = settings.sampling  # raises if its keys contradict each other
    rows = settings.batch_size * settings.grpo_samples
    if rows % settings.rows_per_forward:
        raise ValueError(
            f"forward_batch_size={settings.forward_batch_size}: does not divide the "
            f"batch_size * grpo_samples = {rows} rows of a batch; give a divisor of {rows}."
        )
    if settings.forward_token_budget is not None and settings.forward_batch_size is not None:
        raise ValueError(
            f"forward_token_budget={settings.forward_token_budget}: replaces forward_batch_size="
            f"{settings.forward_batch_size}; set one of them to null."
        )
    if settings.old_logprobs == "sampler" and settings.sampling_correction is not None:
        raise ValueError(
            "old_logprobs=sampler: the ratio then corrects for the sampler already; set "
            f"sampling_correction={settings.sampling_correction} to null."
        )
    cuda_only = {
        "packed_attention=flex": (settings.packed_attention == "flex", "auto"),
        "rollout.cuda_graphs=True": (settings.rollout.cuda_graphs, "false"),
    }
    for name, (asked, remedy) in cuda_only.items():
        if asked and not settings.device.startswith("cuda"):
            raise ValueError(
                f"{name}: works on CUDA, not on device={settings.device}; set it to {remedy}."
            )
    if settings.compile and settings.packed_attention == "segments":
        raise ValueError(
            "packed_attention=segments: compile=True would compile the layers anew for each step's "
            "lengths; set packed_attention to auto."
        )
    if settings.rollout.cuda_graphs and settings.rollout.gather == "layer":
        raise ValueError(
            "rollout.cuda_graphs=True: layers gathered for each token cannot be recorded; set it "
            "to false, or rollout.gather to once."
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


def check_token_budget(settings: GRPOConfig, *, longest_prompt: int) -> None:
    """Raises a ValueError if a single row can exceed ``forward_token_budget``.

    Args:
        settings (GRPOConfig): the config.
        longest_prompt (int): of the training data, in tokens.
    """
    budget = settings.forward_token_budget
    longest = longest_prompt + settings.max_generated_tokens - 1  # the last token is not read
    if budget is not None and longest > budget:
        raise ValueError(
            f"forward_token_budget={budget}: the longest prompt of {longest_prompt} tokens with "
            f"max_generated_tokens={settings.max_generated_tokens} makes a row of {longest}; give "
            f"at least {longest}, or lower dataset.max_prompt_tokens or max_generated_tokens."
        )


def check_context(settings: GRPOConfig, *, prompt_lengths: Mapping[str, int]) -> None:
    """Raises a ValueError if the longest prompt and response do not fit the model's context.

    Args:
        settings (GRPOConfig): the config.
        prompt_lengths (Mapping[str, int]): the longest prompt in tokens of each data set's key.
    """
    with torch.device("meta"):  # no weights are made
        context = config.instantiate(settings.model).max_seq_len
    for name, longest in prompt_lengths.items():
        room = context - settings.max_generated_tokens
        if longest > room:
            raise ValueError(
                f"{name}: the longest prompt has {longest} tokens, which with max_generated_tokens="
                f"{settings.max_generated_tokens} exceeds the model's context of {context}. Set "
                f"{name}.max_prompt_tokens to at most {room}, or lower max_generated_tokens."
            )
