"""What a model's ``config.json`` says: its shape, and which of torchtune's layers compute it.

A key that changes the computation and is not implemented here is refused by name. Keys that
transformers' implementation of the model does not read are ignored, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtune_grpo.config.text import describe, read_json, shortened

GEMMA3 = "gemma3_text"
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", GEMMA3)
# The kinds of scaled rotations in transformers whose frequencies do not depend on the text's length
_SCALED_ROTATIONS = ("linear", "llama3", "yarn")
# Key of config.json -> the values under which it has no effect
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "use_bidirectional_attention": (False,),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
}


class Rotation(NamedTuple):
    """Parameters of a rotary position embedding."""

    frequencies: Tensor  # [head_dim / 2] radians per position, float32
    scale: float = 1.0  # of cosines and sines


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder's shape and parts."""

    model_type: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    intermediate_dim: int
    max_seq_len: int  # of the sliding window if there is one: within it all layers see everything
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    rotations: tuple[Rotation, ...]  # one per layer; layers may share one

    @property
    def is_gemma(self) -> bool:
        """Whether it has norms around each block, scaled embeddings, and GELU."""
        return self.model_type == GEMMA3

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalized, head by head, before they are rotated."""
        return self.model_type in ("qwen3", GEMMA3)


def read_architecture(model_dir: str | Path) -> Architecture:
    """Read ``config.json`` through transformers, whose defaults hold for keys it leaves out.

    Raises a ValueError that names the key if the model cannot be computed exactly.
    """
    given, hf = _read_config(model_dir)
    kinds = _layer_kinds(hf)
    for key, value, remedy in _unsupported(given, hf, kinds):
        raise ValueError(f"model_dir={model_dir}: config.json says {key}={value!r}; {remedy}.")
    kind, heads = hf.model_type, hf.num_attention_heads
    rotations = {name: _rotation(hf, name) for name in set(kinds)}
    window = hf.sliding_window if "sliding_attention" in kinds else None
    # transformers' Mistral and Qwen 2 ignore the key.
    attention_bias = kind not in ("mistral", "qwen2") and bool(hf.attention_bias)
    return Architecture(
        model_type=kind,
        vocab_size=hf.vocab_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=hf.num_key_value_heads or heads,
        head_dim=_head_dim(hf),
        embed_dim=hf.hidden_size,
        intermediate_dim=hf.intermediate_size,
        max_seq_len=min(hf.max_position_embeddings, window or hf.max_position_embeddings),
        norm_eps=hf.rms_norm_eps,
        qkv_bias=kind == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=kind == "llama" and bool(hf.mlp_bias),
        tied=bool(hf.tie_word_embeddings),
        rotations=tuple(rotations[name] for name in kinds),
    )


def _read_config(model_dir: str | Path) -> tuple[dict[str, Any], Any]:
    """The content of config.json, and what transformers makes of it."""
    if not Path(model_dir, "config.json").is_file():
        raise ValueError(
            f"model_dir={model_dir}: has no config.json; name the folder of a model, as `tune "
            "download <model> --output-dir <folder>` makes it."
        )
    given = read_json(model_dir, "config.json", key="model_dir")
    kind = given.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(
            f"model_dir={model_dir}: config.json says model_type={kind!r}; supported are "
            f"{', '.join(SUPPORTED)}."
        )
    from transformers import AutoConfig  # takes a second to import

    try:
        return given, AutoConfig.from_pretrained(str(model_dir))
    except Exception as error:  # of any type: each key has its own validator
        raise ValueError(
            f"model_dir={model_dir}: transformers rejects its config.json: "
            f"{shortened(describe(error), 300)}. Fetch the model again, or correct the key."
        ) from error


def _unsupported(
    given: Mapping[str, Any], hf: Any, kinds: list[str]
) -> Iterator[tuple[str, Any, str]]:
    """Keys whose effect is not implemented: name, value and remedy."""
    for name in hf.architectures or ():
        if not name.endswith("ForCausalLM"):
            yield "architectures", name, "only a causal language model can be trained"
    for key, harmless in _WITHOUT_EFFECT.items():
        value = getattr(hf, key, given.get(key))
        if value is not None and value not in harmless:
            yield key, value, "such a model is not supported"
    is_gemma = hf.model_type == GEMMA3
    key = "hidden_activation" if is_gemma else "hidden_act"
    activation = "gelu_pytorch_tanh" if is_gemma else "silu"
    if getattr(hf, key) != activation:
        yield key, getattr(hf, key), f"supported is {activation}"
    if is_gemma and hf.query_pre_attn_scalar != _head_dim(hf):
        yield "query_pre_attn_scalar", hf.query_pre_attn_scalar, "supported is head_dim"
    for name in kinds:
        rope = _rope_parameters(hf, name)["rope_type"]
        if rope not in ("default", *_SCALED_ROTATIONS):
            yield "rope_type", rope, f"supported are default, {', '.join(_SCALED_ROTATIONS)}"


def _head_dim(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def _layer_kinds(hf: Any) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for each layer."""
    layers = hf.num_hidden_layers
    if getattr(hf, "layer_types", None):
        return list(hf.layer_types)
    every = getattr(hf, "sliding_window_pattern", layers + 1)  # Gemma's before transformers 5
    if getattr(hf, "sliding_window", None) is None or not getattr(hf, "use_sliding_window", True):
        every = 1
    return ["sliding_attention" if n % every else "full_attention" for n in range(1, layers + 1)]


def _rope_parameters(hf: Any, kind: str) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and so on of a kind of layer."""
    parameters = getattr(hf, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        parameters = dict(getattr(hf, "rope_scaling", None) or {})
        if kind == "sliding_attention" and hasattr(hf, "rope_local_base_freq"):
            parameters = {"rope_theta": hf.rope_local_base_freq}
        parameters.setdefault("rope_theta", hf.rope_theta)
    elif isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    return {"rope_type": parameters.get("type", "default"), **parameters}


def _rotation(hf: Any, kind: str) -> Rotation:
    parameters, head_dim = _rope_parameters(hf, kind), _head_dim(hf)
    with torch.device("cpu"):
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
            return Rotation(1.0 / (parameters["rope_theta"] ** exponents))
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        nested = kind in (getattr(hf, "rope_parameters", None) or ())
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, scale = compute(hf, "cpu", **({"layer_type": kind} if nested else {}))
    return Rotation(frequencies, scale)
