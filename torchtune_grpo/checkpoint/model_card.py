"""A checkpoint's ``README.md``: what was trained on what, how, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchtune_grpo.checkpoint.folder import checkpoint_folder
from torchtune_grpo.checkpoint.resume import HIDDEN

CARD_FILE = "model_card.json"

# Keys of the config that a reader wants to know; each stands for all keys below it.
_KEYS = (
    *("model", "dtype", "dataset", "rewards", "eval_dataset", "loss", "objective"),
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
{results}

## How to load it

```python
{code}
```
{more}{asked}
## How it was trained

{note}```yaml
{config}
```
"""
_WHOLE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({place})
tokenizer = AutoTokenizer.from_pretrained({place})"""
_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}")
{quantize}model = PeftModel.from_pretrained(base, {adapter})
tokenizer = AutoTokenizer.from_pretrained({place})"""
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


@dataclass(frozen=True)
class ModelCard:
    """What a card says; a checkpoint keeps it, so that the card can be written for another place.

    ``base`` is the base model's name on the hub, or an absolute path. A checkpoint has merged
    weights, or an adapter in PEFT's format, or both; the adapter's base may be quantized.
    """

    config: Mapping[str, object]  # by dotted key
    step: int
    base: str
    has_weights: bool
    has_adapter: bool
    is_quantized: bool
    results: str = ""  # what training has changed
    asked: Mapping[str, object] = field(default_factory=dict)  # how its prompts were written

    @classmethod
    def found(cls, folder: object) -> ModelCard | None:
        """Load the card of a checkpoint; None of anything else."""
        is_one = isinstance(folder, (str, Path)) and Path(folder, CARD_FILE).is_file()
        return cls.load(Path(str(folder))) if is_one else None

    @classmethod
    def load(cls, checkpoint: Path) -> ModelCard:
        return cls(**json.loads((checkpoint / CARD_FILE).read_text(encoding="utf-8")))

    def save(self, checkpoint: Path) -> None:
        """Write the card, and what it is made from."""
        text = json.dumps(asdict(self), indent=1)
        (checkpoint / CARD_FILE).write_text(text, encoding="utf-8")
        (checkpoint / "README.md").write_text(self.text(), encoding="utf-8")

    @property
    def public_base(self) -> str:
        """The base model's name; of a local one, that of its folder."""
        return Path(self.base).name if self.is_local else self.base

    @property
    def is_local(self) -> bool:
        """Whether the base model has no name on the hub."""
        return self.base.startswith("/")

    def text(self, repo: str | None = None) -> str:
        """Return the card for its folder or, without secrets and local paths, for the hub."""
        folder = str(checkpoint_folder(Path(), self.step))
        place, adapter = f'"{folder}"', f'"{folder}/adapter"'
        if repo is not None:
            place, adapter = f'"{repo}"', f'"{repo}", subfolder="adapter"'
        base = self.base if repo is None else self.public_base
        more = (_OF_QUANTIZED if self.is_quantized else _SAME).format(base=base)
        return _HEAD.format(
            library="transformers" if self.has_weights else "peft",
            base_model="" if self.is_local else f"base_model: {base}\n",  # the hub takes no path
            title=base.rpartition("/")[2],
            base=base,
            steps="1 step" if self.step == 1 else f"{self.step} steps",
            results=self.results,
            code=self._code(base, place, adapter),
            more=f"\n{more}\n" if self.has_weights and self.has_adapter else "",
            asked=self._form,
            note="`run_config.json` has all keys.\n\n" if repo is None else "",
            config="\n".join(self._keys(is_public=repo is not None)),
        )

    @property
    def _form(self) -> str:
        """Return what a prompt is to look like, if not like a user's plain message."""
        plain = {"prompt_template": "{prompt}", "chat": True}
        lines = [f"- {n}: {v!r}\n" for n, v in self.asked.items() if v and plain.get(n) != v]
        return f"\n## How to ask it\n\nAs in training:\n\n{''.join(lines)}" if lines else ""

    def _code(self, base: str, place: str, adapter: str) -> str:
        """Return the lines that load it."""
        if self.has_weights:
            return _WHOLE.format(place=place)
        quantize, imports = "", ""
        if self.is_quantized:
            dtype = "float32" if self.config["dtype"] == "fp32" else "bfloat16"
            quantize = _QUANTIZE.format(dtype=dtype)
            imports = "import torch\nfrom torchao.dtypes.nf4tensor import to_nf4\n"
        return imports + _ADAPTER.format(place=place, adapter=adapter, base=base, quantize=quantize)

    def _keys(self, *, is_public: bool) -> Iterator[str]:
        """Yield the lines of the config that it shows."""
        for name in _KEYS:
            for key, value in self.config.items():
                is_shown = f"{key}.".startswith(f"{name}.") and "/" not in key  # a file's digest
                if is_public and isinstance(value, str):
                    is_shown &= not value.startswith(HIDDEN)
                    value = Path(value).name if value.startswith("/") else value
                if is_shown:
                    yield f"{key}: {value}"
