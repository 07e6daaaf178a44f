"""What vLLM cannot sample as the trainer computes it, told from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.models.build import UnsupportedModelError, read_config

_BIASES = {"qwen3": "attention_bias", "ernie4_5": "use_bias"}  # that vLLM leaves out
COOLEST, HOTTEST = 0.01, 2.0  # vLLM raises lower temperatures and refuses higher ones


def local_problems_in(cfg: GRPOConfig) -> Iterator[str]:
    """Yield a sentence for each reason why vLLM would not start or sample here as the trainer."""
    if find_spec("vllm") is None:
        yield (
            "rollout.engine=vllm: vLLM is not installed; pip install 'vllm>=0.32,<0.34', or for a "
            "CPU see docs/rollout.md."
        )
    yield from problems_in(cfg)


def problems_in(cfg: GRPOConfig) -> Iterator[str]:
    """Yield a sentence for each value with which vLLM would sample from another policy."""
    yield from temperature_problems({"temperature": cfg.temperature})
    yield from temperature_problems(cfg.evaluation.sampling, "evaluation.sampling.")
    if Path(folder := cfg.checkpointer.checkpoint_dir, "config.json").is_file():
        yield from _model_problems(folder)
    if dropout := cfg.model.get("lora_dropout"):
        yield (
            f"model.lora_dropout={dropout}: hides whether vLLM's log-probs are the trainer's; "
            "with rollout.engine=vllm set it to 0."
        )


def _model_problems(folder: str) -> Iterator[str]:
    try:
        hf = read_config(folder)
    except UnsupportedModelError as error:
        yield f"{error} rollout.engine=vllm takes no others; set it to native."
        return
    says = f"model_dir={folder}: config.json says"
    key = _BIASES.get(hf.model_type, "")
    if getattr(hf, key, False):
        yield (
            f"{says} {key}=True: vLLM leaves biases of such a {hf.model_type} out; set "
            "rollout.engine to native."
        )
    first = getattr(hf, "max_window_layers", hf.num_hidden_layers)  # of those with a window
    if len({*(getattr(hf, "layer_types", None) or ())}) > 1 and first != hf.num_hidden_layers:
        yield (
            f"{says} max_window_layers={first}: vLLM takes no Qwen in which only some layers have "
            "a window; set rollout.engine to native."
        )


def temperature_problems(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence about a temperature with which vLLM's log-probs are not the trainer's."""
    temperature = values.get("temperature") or 1.0
    if not COOLEST <= temperature <= HOTTEST:
        yield (
            f"{prefix}temperature={temperature}: rollout.engine=vllm takes {COOLEST} to {HOTTEST}; "
            "give that, or set rollout.engine to native."
        )
