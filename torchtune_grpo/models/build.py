"""Builders for ``model._component_``: a model of torchtune's modules, as ``config.json`` says.

Parameters have torchtune's names and Hugging Face's order of rows. A key that changes the
computation and is not implemented here is refused by name. Keys that transformers' implementation
of the model does not read are ignored here, too: those that are no fields of its config's class.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune import utils
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import LORA_ATTN_MODULES
from torchtune.utils._logging import log_once

from torchtune_grpo.config.text import ConfigError, describe, read_json, shortened
from torchtune_grpo.models.auto import TransformersModel, transformers_model
from torchtune_grpo.models.families import ACTIVATIONS, FAMILIES, AllHeadsNorm
from torchtune_grpo.models.layers import (
    Scale,
    UniformAttention,
    lora_linear,
    save_without_nf4,
    scale_output,
)

log = utils.get_logger("INFO")

# The kinds of scaled rotations in transformers whose frequencies do not depend on the text's length
# (longrope's do not within the original context, to which it is cut)
_SCALED_ROTATIONS = ("linear", "llama3", "yarn", "longrope")
# Key of config.json -> the values under which it has no effect, first that of a missing key
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,)),
    **dict.fromkeys(("quantization_config", "per_layer_config"), (None,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0)),
    "logit_scale": (None, 1.0),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "position_embedding_type": ("rope",),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
}
_READ_FOR_ALL_TYPES = ("is_causal", "quantization_config", "per_layer_config")
_DROPOUTS = [f"{of}_dropout" for of in ("attention", "hidden", "residual", "embedding")]
_DROPOUTS += ["resid_pdrop", "embd_pdrop"]
_ATTENTION: Sequence[LORA_ATTN_MODULES] = ("q_proj", "k_proj", "v_proj", "output_proj")
# name, inputs, outputs, bias -> layer
Linear = Callable[[str, int, int, bool], nn.Module]


class UnsupportedModelError(ValueError):
    """Names a key of config.json that is not implemented here; transformers may have it."""


def hf_model(model_dir: str) -> TransformerDecoder | TransformersModel:
    """Build a model for full fine-tuning from ``config.json`` in ``model_dir``.

    What torchtune's modules cannot compute exactly, transformers' own do.
    """
    if (hf := _config_of_the_table(model_dir)) is None:
        return transformers_model(model_dir)

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias)

    return _build(model_dir, hf, linear)


def lora_hf_model(
    model_dir: str,
    lora_attn_modules: Sequence[LORA_ATTN_MODULES] | None = None,
    apply_lora_to_mlp: bool | None = None,
    apply_lora_to_output: bool = False,
    lora_rank: int = 32,
    lora_alpha: float = 64,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder | TransformersModel:
    """Build such a model with LoRA, DoRA or QLoRA; the arguments are those of torchtune's builders.

    None stands for all of a layer's linear modules. ``quantize_base`` keeps all but embeddings and
    output projection in NF4.
    """
    if (hf := _config_of_the_table(model_dir)) is None:
        if lora_attn_modules or apply_lora_to_mlp or apply_lora_to_output:
            raise ValueError(
                "lora_attn_modules, apply_lora_to_mlp and apply_lora_to_output name torchtune's "
                f"modules, and transformers' compute model_dir={model_dir}: remove them, or take "
                "torchtune_grpo.models.transformers_model with its lora_modules."
            )
        options: Any = {"lora_dropout": lora_dropout, "use_dora": use_dora}
        return transformers_model(
            model_dir, lora_rank, lora_alpha, quantize_base=quantize_base, **options
        )
    if apply_lora_to_output and hf.tie_word_embeddings:
        raise ValueError(
            "apply_lora_to_output=True: the model's output projection is its embedding; set it to "
            "False."
        )
    adapted = {*(_ATTENTION if lora_attn_modules is None else lora_attn_modules)}
    adapted |= {"w1", "w2", "w3"} if apply_lora_to_mlp is not False else set()
    adapted |= {"output"} if apply_lora_to_output else set()
    if not adapted:
        raise ValueError("lora_attn_modules=[]: no layer has an adapter; name at least one.")
    adapted_linear = lora_linear(lora_rank, lora_alpha, use_dora, dropout=lora_dropout)

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        quantized = quantize_base and name != "output"
        if quantized and inputs * outputs % (64 * 256):
            raise ConfigError(
                "quantize_base=True: NF4 needs weights of a multiple of 16384 numbers, but "
                f"{name} has {outputs} x {inputs}; set it to False."
            )
        if name in adapted:
            return adapted_linear(inputs, outputs, use_bias=bias, quantize_base=quantized)
        return (FrozenNF4Linear if quantized else nn.Linear)(inputs, outputs, bias=bias)

    model = _build(model_dir, hf, linear)
    if quantize_base:
        save_without_nf4(model, model.tok_embeddings.weight.dtype)
    return model


def _build(model_dir: str, hf: Any, linear: Linear) -> TransformerDecoder:
    for key in _DROPOUTS:
        if rate := _read(hf, key):
            message = f"config.json says {key}={rate}, which is taken as 0"
            log_once(log, f"model_dir={model_dir}: {message}.", level=logging.WARNING)
    try:
        return _decoder(hf, linear)
    except ConfigError:
        raise
    except Exception as error:  # of any type: numbers that contradict each other fail anywhere
        raise ValueError(
            f"model_dir={model_dir}: its config.json describes no model: "
            f"{shortened(describe(error), 300)}. Fetch the model again, or correct the key."
        ) from error


def _decoder(hf: Any, linear: Linear) -> TransformerDecoder:
    family, width = FAMILIES[hf.model_type], hf.hidden_size
    hidden = getattr(hf, family.hidden)

    def layer(name: str, inputs: int, outputs: int) -> nn.Module:
        return linear(name, inputs, outputs, family.has_bias(hf, name))

    def norm(size: int, kind: Any = family.norm) -> nn.Module:
        return kind(size, eps=getattr(hf, family.eps))

    def norm_at(name: str, *, default: nn.Module) -> nn.Module:
        return norm(width) if name in family.norms else default

    embeddings = family.embedding(hf.vocab_size, width)  # first: a seed's adapters follow
    kinds, residual = _layer_kinds(hf), float(_read(hf, "residual_multiplier", 1.0))
    scale = nn.Identity() if residual == 1.0 else Scale(residual)
    if not kinds:
        raise ValueError("num_hidden_layers=0")
    rotations = {kind: family.rotation(*_rotation(hf, kind)) for kind in set(kinds)}
    layers = [
        TransformerSelfAttentionLayer(
            _attention(hf, layer, rotations[kind] if rotated else None, norm, kind),
            FeedForward(
                gate_proj=layer("w1", width, hidden),
                down_proj=layer("w2", hidden, width),
                up_proj=layer("w3", width, hidden) if "mlp.w3" in family.mlp else None,
                activation=ACTIVATIONS[_activation(hf)[1]](),
            ),
            sa_norm=norm_at("sa_norm", default=nn.Identity()),
            mlp_norm=norm_at("mlp_norm", default=nn.Identity()),
            sa_scale=norm_at("sa_scale", default=scale),
            mlp_scale=norm_at("mlp_scale", default=scale),
        )
        for kind, rotated in zip(kinds, _rotates(hf, kinds), strict=True)
    ]
    tied = hf.tie_word_embeddings
    model = TransformerDecoder(
        tok_embeddings=embeddings,
        layers=nn.ModuleList(layers),
        max_seq_len=context_length(hf),
        num_heads=hf.num_attention_heads,
        head_dim=head_dim(hf),
        norm=norm(width),
        output=TiedLinear(embeddings) if tied else layer("output", width, hf.vocab_size),
    )
    scale_output(model.tok_embeddings, float(_read(hf, "embedding_multiplier", 1.0)))
    scale_output(model.norm, 1 / _read(hf, "logits_scaling", 1.0))
    return model


def _attention(
    hf: Any,
    layer: Callable[[str, int, int], nn.Module],
    rotation: nn.Module | None,
    norm: Callable[[int, object], nn.Module],
    layer_kind: str,
) -> MultiHeadAttention:
    size, heads, kind = head_dim(hf), hf.num_attention_heads, FAMILIES[hf.model_type].qk_norm
    kv_heads = hf.num_key_value_heads or heads
    normed = (heads, kv_heads) if kind is AllHeadsNorm else (1, 1)
    q_norm, k_norm = (None if kind is None else norm(n * size, kind) for n in normed)
    attention = UniformAttention(
        embed_dim=heads * size,  # only checked to be a multiple of num_heads
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        q_proj=layer("q_proj", hf.hidden_size, heads * size),
        k_proj=layer("k_proj", hf.hidden_size, kv_heads * size),
        v_proj=layer("v_proj", hf.hidden_size, kv_heads * size),
        output_proj=layer("output_proj", heads * size, hf.hidden_size),
        pos_embeddings=rotation,
        q_norm=q_norm,
        k_norm=k_norm,
        max_seq_len=context_length(hf),
    )
    if layer_kind == "sliding_attention":
        attention.window = window = _read(hf, "sliding_window")
        if type(window) is not int or window < 1:
            raise ValueError(f"sliding_window={window!r}, with layers of sliding attention")
    return attention


# --- What config.json says ----------------------------------------------------------------------


def read_config(model_dir: str | Path) -> Any:
    """Read a folder's config with transformers, whose defaults hold for keys it leaves out.

    Raises an UnsupportedModelError that names the key if the model cannot be computed exactly.
    """
    if not Path(model_dir, "config.json").is_file():
        raise ValueError(
            f"model_dir={model_dir}: has no config.json; name the folder of a model, as `tune "
            "download <model> --output-dir <folder>` makes it."
        )
    given = read_json(model_dir, "config.json", key="model_dir")
    kind, text = given.get("model_type"), given.get("text_config")
    if kind not in FAMILIES:
        is_known = isinstance(text, Mapping) and text.get("model_type") in FAMILIES
        sees = ", and shows how to take out its text part" if is_known else ""
        raise UnsupportedModelError(
            f"model_dir={model_dir}: config.json says model_type={kind!r}; docs/models.md lists "
            f"those that are built of torchtune's modules{sees}."
        )
    from transformers import AutoConfig  # takes a second to import

    try:
        hf = AutoConfig.from_pretrained(str(model_dir))
    except Exception as error:  # of any type: each key has its own validator
        raise ValueError(
            f"model_dir={model_dir}: transformers rejects its config.json: "
            f"{shortened(describe(error), 300)}. Fetch the model again, or correct the key."
        ) from error
    for key, value in _unsupported(given, hf):
        raise UnsupportedModelError(
            f"model_dir={model_dir}: config.json says {key}={value!r}, unknown to torchtune."
        )
    return hf


def _config_of_the_table(model_dir: str) -> Any:
    """Read a folder's config; None if its model is one for transformers' modules."""
    try:
        return read_config(model_dir)
    except UnsupportedModelError as error:
        log_once(log, str(error))
        return None


def head_dim(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def context_length(hf: Any) -> int:
    """Return the context within which all positions are alike."""
    limits = [hf.max_position_embeddings]
    rope = _rope_parameters(hf, "full_attention")
    # Beyond it, queries are scaled or frequencies others.
    if rope.get("llama_4_scaling_beta") or rope["rope_type"] == "longrope":
        limits.append(rope["original_max_position_embeddings"])
    return min(limits)


def _read(hf: object, key: str, default: Any = None) -> Any:
    """Return the value of a key that the model reads, or the default.

    A config also keeps keys that its model does not read; those that it does are parameters.
    """
    return getattr(hf, key) if key in inspect.signature(type(hf)).parameters else default


def _unsupported(given: Mapping[str, Any], hf: Any) -> Iterator[tuple[str, object]]:
    """Yield the keys whose effect is not implemented, and their values."""
    for name in hf.architectures or ():
        if not str(name).endswith("ForCausalLM"):
            yield "architectures", name
    for key, harmless in _WITHOUT_EFFECT.items():
        value = given.get(key) if key in _READ_FOR_ALL_TYPES else _read(hf, key, harmless[0])
        if value not in harmless:
            yield key, value
    key, activation = _activation(hf)
    if activation not in ACTIVATIONS:
        yield key, activation
    for name in _layer_kinds(hf):
        if name not in ("full_attention", "sliding_attention"):
            yield "layer_types", name
        rope = _rope_parameters(hf, name)
        if rope["rope_type"] not in ("default", *_SCALED_ROTATIONS):
            yield "rope_type", rope["rope_type"]
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1.0 and not FAMILIES[hf.model_type].partial_rotation:
            yield "partial_rotary_factor", part


def _activation(hf: object) -> tuple[str, str]:
    """Return the key that names the activation, and its name."""
    if (name := _read(hf, "hidden_activation", "")) != "":
        return "hidden_activation", name or "gelu_pytorch_tanh"  # as Gemma's first config means it
    return "hidden_act", _read(hf, "hidden_act")


def _attention_scale(hf: object) -> float:
    """Return the factor of q @ k beside head_dim**-0.5."""
    if (scalar := _read(hf, "query_pre_attn_scalar")) is not None:
        return (head_dim(hf) / scalar) ** 0.5
    if (multiplier := _read(hf, "attention_multiplier")) is not None:
        return multiplier * head_dim(hf) ** 0.5
    return 1.0


def _layer_kinds(hf: Any) -> list[str]:
    """Return ``full_attention`` or ``sliding_attention`` for each layer."""
    layers = hf.num_hidden_layers
    if kinds := _read(hf, "layer_types"):
        return list(kinds)
    every = _read(hf, "sliding_window_pattern") or layers + 1  # Gemma's before transformers 5
    if _read(hf, "sliding_window") is None or not _read(hf, "use_sliding_window", True):
        every = 1
    return ["sliding_attention" if n % every else "full_attention" for n in range(1, layers + 1)]


def _rotates(hf: Any, kinds: Sequence[str]) -> list[bool]:
    """Tell of each layer whether it rotates queries and keys."""
    if FAMILIES[hf.model_type].rotates_in_windows and hf.sliding_window is not None:
        return [kind == "sliding_attention" for kind in kinds]
    return _read(hf, "no_rope_layers") or [True] * len(kinds)  # 0: it does not


def _rope_parameters(hf: Any, kind: str) -> dict[str, Any]:
    """Return ``rope_type``, ``rope_theta`` and so on for a kind of layer."""
    parameters = getattr(hf, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        parameters = dict(getattr(hf, "rope_scaling", None) or {})
        if kind == "sliding_attention" and _read(hf, "rope_local_base_freq") is not None:
            parameters = {"rope_theta": hf.rope_local_base_freq}
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if getattr(hf, key, None) is not None:
                parameters.setdefault(key, getattr(hf, key))
    elif FAMILIES[hf.model_type].rotation_by_kind:
        parameters = parameters.get(kind) or {}
    return {"rope_type": parameters.get("type", "default"), **parameters}


def _rotation(hf: Any, kind: str) -> tuple[Tensor, float]:
    """Return frequencies [rotated numbers / 2] float32, and the scale of cos and sin.

    Queries and keys are both scaled, so each by the root of what their products are scaled by.
    """
    parameters, scale = _rope_parameters(hf, kind), _attention_scale(hf) ** 0.5
    with torch.device("cpu"):
        if parameters["rope_type"] == "default":
            size = int(head_dim(hf) * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, size, 2).float() / size
            return 1.0 / (parameters["rope_theta"] ** exponents), scale
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        nested = FAMILIES[hf.model_type].rotation_by_kind and hasattr(hf, "rope_parameters")
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, own = compute(hf, "cpu", **({"layer_type": kind} if nested else {}))
        return frequencies, own * scale
