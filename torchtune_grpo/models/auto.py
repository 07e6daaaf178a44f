"""Causal models of any type, by transformers' own modules, with the interface of torchtune's.

Nothing is computed here that transformers computes: its base model makes hidden states, and its
causal model makes logits from these, with caps and scales. Rows are padded on the right, so that
causal attention and states are exact without a mask. ``TransformersKind.check_loaded`` shows, on a
few tokens, that a model is such a one.

Nothing is dropped out in training, whatever config.json says: the policy that is trained is the one
that samples. Losses for routers of experts are off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune import utils
from torchtune.utils._logging import log_once

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.models.auto_kind import TransformersKind
from torchtune_grpo.models.layers import lora_linear, save_without_nf4
from torchtune_grpo.models.tokenizer import is_before_transformers_5

log = utils.get_logger("INFO")

_UNLIMITED = 2**20  # tokens, of a model without a table of positions
_CHANGING = ("longrope", "dynamic")  # rotations that are others beyond the original context
# Names within a model that also sees or hears -> within its text part alone
_TEXT_PART = {
    r"^(model\.)?language_model\.model\.": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^model\.(language|text)_model\.": "model.",
}


def transformers_model(
    model_dir: str,
    lora_rank: int | None = None,
    lora_alpha: float = 64,
    lora_modules: Sequence[str] | None = None,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformersModel:
    """Build a model that transformers has, from ``config.json`` in ``model_dir``.

    With a ``lora_rank`` the linear modules of its layers with these names, such as ``q_proj``, get
    LoRA or DoRA; None: all of them. ``quantize_base`` keeps those in NF4.
    """
    model = TransformersModel(*_build(model_dir))
    log_once(
        log,
        f"{model.hf.config.model_type}: transformers' own modules compute this model, more slowly "
        "than the types of docs/models.md: rows are padded, and a prompt is computed for each of "
        "its samples. Experts, if any, have no adapters, and routers no loss.",
    )
    if lora_rank is None:
        if quantize_base:
            raise ValueError("quantize_base=True: only an adapter can be trained; set lora_rank.")
        return model
    linear = lora_linear(lora_rank, lora_alpha, use_dora, dropout=lora_dropout)
    names = dict(model.linear_modules())
    known = {name.rpartition(".")[2] for name in names}
    wanted = known if lora_modules is None else {*lora_modules}
    chosen = [name for name in names if name.rpartition(".")[2] in wanted]
    if not (chosen and wanted <= known):
        raise ValueError(
            f"lora_modules={lora_modules and [*lora_modules]}: the model's layers have the linear "
            f"modules {', '.join(sorted(known)) or 'none'}. Experts, one tensor for all, can have "
            "no adapters, which would be multiplied out in each pass; full fine-tuning trains them."
        )
    for name in chosen:
        outputs, inputs = names[name].weight.shape
        in_nf4 = quantize_base and inputs * outputs % (64 * 256) == 0
        has_bias = names[name].bias is not None
        adapted = linear(inputs, outputs, use_bias=has_bias, quantize_base=in_nf4)
        model.set_submodule(name, adapted)
    if quantize_base:
        save_without_nf4(model, model.tok_embeddings.weight.dtype)
    return model


class TransformersModel(nn.Module):
    """A causal model of transformers that is called, trained and sharded as torchtune's are.

    ``names`` are regular expressions for names in the files of its folder, and what replaces them.
    """

    def __init__(self, hf: Any, names: Mapping[str, str]) -> None:
        super().__init__()
        self.hf, self.names = hf.eval(), dict(names)
        self.norm = nn.Identity()  # transformers' hidden states are normed
        self.max_seq_len = _context_length(hf.config)
        _ = self.layers
        self._head_is_matrix = self._probe_head()

    @property
    def layers(self) -> nn.ModuleList:
        lists = [m for m in self._decoder.modules() if isinstance(m, nn.ModuleList)]
        if not lists:
            raise ValueError(f"model: {self.hf.config.model_type} has no list of its layers.")
        return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))

    @property
    def _decoder(self) -> Any:
        """What makes hidden states; the rest of ``hf`` makes logits of them."""
        found, others = self.hf.get_decoder(), (self.hf, self.hf.get_output_embeddings())
        return getattr(self.hf, "model", found) if any(found is each for each in others) else found

    @property
    def tok_embeddings(self) -> nn.Embedding:
        found: nn.Embedding = self.hf.get_input_embeddings()
        return found

    @property
    def output(self) -> Any:
        """What makes logits [..., V] of hidden states [..., D]: a linear module, if that is all."""
        return self.hf.get_output_embeddings() if self._head_is_matrix else self._head

    def forward(
        self, tokens: Any, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Any:
        """Compute logits [n, S, V] of rows [n, S] padded on the right; see ``unembed_with``.

        A function in place of the rows is called within the hooks of a sharded model.
        """
        if not isinstance(tokens, Tensor):
            return tokens()
        assert mask is None and input_pos is None, "rows are not packed"
        return self.unembed(self._decoder(tokens, use_cache=False).last_hidden_state)

    def unembed(self, h: Tensor) -> Tensor:
        """Compute logits [n, S, V] of hidden states [n, S, D]."""
        return self.output(h.flatten(0, 1)).unflatten(0, h.shape[:2])

    def train(self, mode: bool = True) -> TransformersModel:
        """Let only adapters drop out, in training."""
        super().train(False)
        for module in self.modules():
            if hasattr(module, "adapter_params"):
                module.train(mode)
        return self

    def linear_modules(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield the linear modules in the layers that an adapter can stand beside, by name.

        The last one of a state-space mixer is none of them: the kernel for all of the mixer reads
        its weight, and PEFT refuses it.
        """
        inside = {*self.layers.modules()}
        for path, parent in self.named_modules():
            fused = "out_proj" if hasattr(parent, "A_log") and hasattr(parent, "D") else None
            for name, module in parent.named_children():
                if type(module) is nn.Linear and module in inside and name != fused:
                    yield f"{path}.{name}", module

    def tie_weights(self) -> None:
        """Tie what is one matrix again, after parameters have been made anew."""
        self.hf.tie_weights()

    @property
    def kind(self) -> TransformersKind:
        return TransformersKind(self)

    def _probe_head(self) -> bool:
        """Tell whether the logits are a product of hidden states and one matrix, unchanged.

        A small matrix takes the output projection's place, so that no weights are needed.
        """
        whole = self.hf.get_output_embeddings()
        if type(whole) is not nn.Linear or whole.bias is not None:
            return False
        name = next(name for name, module in self.hf.named_modules() if module is whole)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = nn.Linear(whole.in_features, 3, bias=False, dtype=torch.float32)
            h = 10 * torch.randn(4, whole.in_features)
        self.hf.set_submodule(name, small)
        try:
            with torch.no_grad():
                return torch.equal(self._head(h), F.linear(h, small.weight))
        except Exception:  # it needs more than hidden states
            return False
        finally:
            self.hf.set_submodule(name, whole)

    def _head(self, h: Tensor) -> Tensor:
        """Compute logits [K, V] of hidden states [K, D], by all that follows the base model."""
        base, tokens = self._decoder, torch.zeros(1, len(h), dtype=torch.long, device=h.device)
        own = vars(base).get("forward")
        base.forward = lambda *args, **kwargs: _BaseOutput([h[None]])
        try:
            logits: Tensor = self.hf(tokens, use_cache=False).logits[0]
            return logits
        finally:
            del base.forward
            if own is not None:
                base.forward = own


class _BaseOutput(tuple[Tensor]):
    """What a base model returns: hidden states, and None of all else that a head may read."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _build(model_dir: str) -> tuple[Any, dict[str, str]]:
    """Build the causal model, or its text part; return what renames weights in its files, too."""
    if is_before_transformers_5():
        raise ValueError(
            f"model_dir={model_dir}: transformers' own modules compute this model, from version 5 "
            'on; `pip install "transformers>=5"`.'
        )
    # Which takes seconds.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
        text = config.get_text_config(decoder=True)
        if text is not config and hasattr(config, "tie_word_embeddings"):
            text.tie_word_embeddings = config.tie_word_embeddings  # by which the whole is made
        if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"it has none of type {text.model_type}")
        if any(getattr(each, "quantization_config", None) for each in (config, text)):
            raise ValueError("the weights are quantized; take a folder in bf16")
        dtype = torch.get_default_dtype()
        model = AutoModelForCausalLM.from_config(text, dtype=dtype)
    except Exception as error:  # of any type: each config has its own validator
        raise ValueError(
            f"model_dir={model_dir}: transformers cannot build a causal model from its config.json"
            f": {shortened(describe(error), 300)}."
        ) from error
    for module in model.modules():
        # Nemotron H and Zamba 2 bound time steps otherwise than their configs, but in one token.
        if hasattr(module, "time_step_limit"):
            limit = getattr(text, "time_step_limit", None)
            module.time_step_limit = tuple(limit or (0.0, float("inf")))
    exact = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in exact):
            parameter.data = parameter.data.float()
    return model, {} if text is config else _TEXT_PART


def _context_length(config: Any) -> int:
    """Return the context within which a token has the same log-prob in a row of any length."""
    limits = [getattr(config, "max_position_embeddings", None) or _UNLIMITED]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if part.get("rope_type") in _CHANGING:
            limits.append(part.get("original_max_position_embeddings") or limits[0])
    return min(limits)
