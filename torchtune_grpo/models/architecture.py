"""What a model's ``config.json`` says, as far as torchtune's modules can compute it.

Whatever changes the computation and is not known here is refused by name. Keys that transformers'
implementation of the model does not read are ignored, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config.text import describe, read_json, shortened

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
GEMMA3 = "gemma3_text"
SUPPORTED = (*LLAMA_LIKE, GEMMA3)
# transformers' rotary embeddings whose frequencies do not depend on the length of the text.
_SCALED = ("linear", "llama3", "yarn")
# Key of config.json -> the values under which it has no effect.
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


@dataclass(frozen=True)
class Rotation:
    """Rotary position embeddings of half-split heads."""

    frequencies: Tensor  # [head_dim / 2] radians per position, float32
    scale: float = 1.0  # of cosines and sines


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder's shape and parts. ``rotations`` has one for each layer; layers may share one.

    ``max_seq_len`` is the model's context; where some layers see a sliding window only, it is the
    window, within which all layers see everything.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    intermediate_dim: int
    max_seq_len: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    rotations: tuple[Rotation, ...]

    @property
    def is_gemma(self) -> bool:
        """Norms around each block, scaled embeddings, and GELU."""
        return self.model_type == GEMMA3

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys are normalized, head by head, before they are rotated."""
        return self.model_type in ("qwen3", GEMMA3)


def read_architecture(model_dir: str | Path) -> Architecture:
    """Reads ``config.json`` as transformers does, whose defaults hold for what it leaves out.

    Raises:
        ValueError: if the folder holds none, or for a model that cannot be computed exactly; the
            message names the key of config.json.
    """
    file = Path(model_dir) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model_dir={model_dir}: holds no config.json; name the folder of a model, as `tune "
            "download <model> --output-dir <folder>` makes it."
        )
    given = read_json(model_dir, file.name, key="model_dir")

    def refuse(key: str, value: Any, remedy: str) -> None:
        raise ValueError(f"model_dir={model_dir}: config.json says {key}={value!r}; {remedy}.")

    kind: Any = given.get("model_type")
    if kind not in SUPPORTED:
        refuse("model_type", kind, f"known are {', '.join(SUPPORTED)}")
    for name in given.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            refuse("architectures", name, "only a causal language model can be trained")
    from transformers import AutoConfig  # which takes a second

    try:
        hf = AutoConfig.from_pretrained(str(model_dir))
    except Exception as error:  # of any kind: each key is checked by another validator
        said = shortened(describe(error), 300)
        raise ValueError(
            f"model_dir={model_dir}: transformers refuses its config.json: {said}. Fetch the model "
            "again, or correct the key."
        ) from error
    for key, harmless in _WITHOUT_EFFECT.items():
        value = getattr(hf, key, given.get(key))
        if value is not None and value not in harmless:
            refuse(key, value, "such a model is not computed here")
    gelu = kind == GEMMA3
    activation = "gelu_pytorch_tanh" if gelu else "silu"
    key = "hidden_activation" if gelu else "hidden_act"
    if getattr(hf, key) != activation:
        refuse(key, getattr(hf, key), f"models of type {kind} are computed with {activation}")
    heads = hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if gelu and hf.query_pre_attn_scalar != head_dim:
        refuse("query_pre_attn_scalar", hf.query_pre_attn_scalar, f"known is head_dim={head_dim}")
    rotations = {}
    kinds = _layer_kinds(hf)
    for name in sorted(set(kinds)):
        parameters = _rope_parameters(hf, name)
        rope = parameters["rope_type"]
        if rope != "default" and rope not in _SCALED:
            refuse("rope_type", rope, f"known are default, {', '.join(_SCALED)}")
        rotations[name] = _rotation(hf, name, parameters, head_dim=head_dim)
    window = hf.sliding_window if "sliding_attention" in kinds else None
    # transformers' Mistral and Qwen 2 read no such keys.
    attention_bias = kind not in ("mistral", "qwen2") and bool(hf.attention_bias)
    return Architecture(
        model_type=kind,
        vocab_size=hf.vocab_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=hf.num_key_value_heads or heads,
        head_dim=head_dim,
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


def _layer_kinds(hf: Any) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for each layer."""
    layers = hf.num_hidden_layers
    if getattr(hf, "layer_types", None):
        return list(hf.layer_types)
    every = getattr(hf, "sliding_window_pattern", layers + 1)  # of old versions' Gemma
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


def _rotation(hf: Any, kind: str, parameters: Mapping[str, Any], *, head_dim: int) -> Rotation:
    with torch.device("cpu"):
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
            return Rotation(1.0 / (parameters["rope_theta"] ** exponents))
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        nested = kind in (getattr(hf, "rope_parameters", None) or ())
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, scale = compute(hf, "cpu", **({"layer_type": kind} if nested else {}))
    return Rotation(frequencies, scale)
