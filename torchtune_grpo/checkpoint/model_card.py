"""A checkpoint's ``README.md``: what was trained on what, how, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_grpo.evaluation.statistics import Comparison

# Of the config, what a reader wants to know; each stands for all keys below it.
_KEYS = (
    *("adapter_dir", "model", "dtype", "dataset", "rewards", "eval_dataset", "loss", "advantage"),
    *("batch_size * ranks", "grpo_samples", "max_generated_tokens", "temperature", "sampling"),
    *("optimizer", "lr_scheduler", "clip_grad_norm", "ppo_epochs", "num_steps", "seed"),
)
_HEAD = """\
---
library_name: {library}
pipeline_tag: text-generation
{base_model}tags:
- grpo
- torchtune
- torchtune-grpo
---

# {title} after {step} steps of GRPO

Trained by reinforcement learning from verifiable rewards
([GRPO](https://arxiv.org/abs/2402.03300)), with torchtune-grpo on torchtune. Base model: `{base}`.
{start}{accuracy}

## How to load it

```python
{code}
```
{more}
## How it was trained

`run_config.json` has all keys.

```yaml
{config}
```
"""
_WHOLE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""
_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{folder}/adapter")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""


def model_card(
    config: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    base: str,
    is_on_hub: bool,
    step: int,
    folder: str,
    has_weights: bool,
    has_adapter: bool,
) -> str:
    """The text of a card.

    Args:
        config (Mapping[str, Any]): the run's, by dotted key.
        evaluations (Sequence[Mapping[str, Any]]): those of the run's record until now, in order.
        base (str): name or folder of the base model.
        is_on_hub (bool): it is a name on the hub.
        step (int): number of finished steps.
        folder (str): name of the checkpoint.
        has_weights (bool): the checkpoint has merged weights.
        has_adapter (bool): it has an adapter in PEFT's format.
    """
    shown = {
        key: config[key] for name in _KEYS for key in config if f"{key}.".startswith(f"{name}.")
    }
    compared = Comparison.of_run(evaluations)
    has_start = any(key.startswith("adapter_dir.") for key in config)
    more = f"\n`adapter/` holds the same as PEFT's adapter of `{base}`.\n" if has_adapter else ""
    return _HEAD.format(
        library="transformers" if has_weights else "peft",
        base_model=f"base_model: {base}\n" if is_on_hub else "",  # no other is accepted there
        title=base.rstrip("/").rpartition("/")[2],
        base=base,
        step=step,
        start="Training began from an adapter of it, `adapter_dir` below. " if has_start else "",
        accuracy=compared.headline if compared else "",
        code=(_WHOLE if has_weights else _ADAPTER).format(folder=folder, base=base),
        more=more if has_weights else "",
        config="\n".join(f"{key}: {value}" for key, value in shown.items()),
    )
