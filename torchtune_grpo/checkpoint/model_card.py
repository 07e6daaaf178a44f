"""A checkpoint's ``README.md``: what was trained on what, how, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune_grpo.checkpoint.folder import checkpoint_folder

# Keys of the config that a reader wants to know; each stands for all keys below it.
_KEYS = (
    *("adapter_dir", "model", "dtype", "dataset", "rewards", "eval_dataset", "loss", "objective"),
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

# {title} after {steps} of GRPO

Trained by reinforcement learning from verifiable rewards
([GRPO](https://arxiv.org/abs/2402.03300)), with torchtune-grpo on torchtune. Base model: `{base}`.
{start}{results}

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
{quantize}model = PeftModel.from_pretrained(base, "{folder}/adapter")
tokenizer = AutoTokenizer.from_pretrained("{folder}")"""

_QUANTIZE = """\
base = base.to(torch.{dtype})
for module in base.model.layers.modules():
    if isinstance(module, torch.nn.Linear):  # as the policy's were
        module.weight.data = to_nf4(module.weight.data).get_original_weight()
"""
_SAME = "`adapter/` holds the same as PEFT's adapter of `{base}`."
_OF_QUANTIZED = """\
`adapter/` was trained on `{base}` quantized to 4 bits (QLoRA). On the weights in full precision it
is another policy: use the merged weights."""


def model_card(
    config: Mapping[str, Any],
    results: str,
    step: int,
    base: str,
    *,
    has_weights: bool,
    has_adapter: bool,
    is_quantized: bool,
) -> str:
    """Return a card's text, given a config by dotted key and what training has changed.

    ``base`` is the base model's name on the hub, or an absolute path. A checkpoint has merged
    weights, or an adapter in PEFT's format, or both; the adapter's base may be quantized.
    """
    shown = {
        key: config[key]
        for name in _KEYS
        for key in config
        if f"{key}.".startswith(f"{name}.") and "/" not in key  # a file's digest
    }
    folder = checkpoint_folder(Path(), step)
    has_start = any(key.startswith("adapter_dir.") for key in config)
    quantize = ""
    if is_quantized:
        dtype = "float32" if config["dtype"] == "fp32" else "bfloat16"
        quantize = _QUANTIZE.format(dtype=dtype)
    code = (_WHOLE if has_weights else _ADAPTER).format(folder=folder, base=base, quantize=quantize)
    if quantize and not has_weights:
        code = f"import torch\nfrom torchao.dtypes.nf4tensor import to_nf4\n{code}"
    more = (_OF_QUANTIZED if is_quantized else _SAME).format(base=base)
    return _HEAD.format(
        library="transformers" if has_weights else "peft",
        base_model="" if base.startswith("/") else f"base_model: {base}\n",  # the hub takes no path
        title=base.rpartition("/")[2],
        base=base,
        steps="1 step" if step == 1 else f"{step} steps",
        start="Training began from an adapter of it, `adapter_dir` below. " if has_start else "",
        results=results,
        code=code,
        more=f"\n{more}\n" if has_weights and has_adapter else "",
        config="\n".join(f"{key}: {value}" for key, value in shown.items()),
    )
