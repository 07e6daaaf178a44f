"""Builders for ``model._component_``: a model of torchtune's modules, as ``config.json`` says.

Parameters have torchtune's names and Hugging Face's order of rows. A key that changes the
computation and is not implemented here is refused by name. Keys that transformers' implementation
of the model does not read are ignored here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.common_utils import reparametrize_as_dtype_state_dict_post_hook
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import LORA_ATTN_MODULES, LoRALinear

from torchtune_grpo.config.text import describe, read_json, shortened
from torchtune_grpo.models.adapter import adapter_settings
from torchtune_grpo.models.layers import HalfRotation, NormFirstAttention, PeftDoRALinear

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
_LORA: dict[str, Any] = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "lora_rank": 32,
    "lora_alpha": 64,
    "use_dora": False,
}
# name, inputs, outputs, bias -> layer
Linear = Callable[[str, int, int, bool], nn.Module]


def hf_model(model_dir: str) -> TransformerDecoder:
    """Build a model for full fine-tuning from ``config.json`` in ``model_dir``."""

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias)

    return _decoder(read_config(model_dir), linear)


def lora_hf_model(
    model_dir: str,
    lora_attn_modules: Sequence[LORA_ATTN_MODULES] | None = None,
    apply_lora_to_mlp: bool | None = None,
    apply_lora_to_output: bool | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    use_dora: bool | None = None,
    quantize_base: bool = False,
    adapter_dir: str | None = None,
) -> TransformerDecoder:
    """Build such a model with LoRA, DoRA or QLoRA; the arguments are those of torchtune's builders.

    None takes the setting of the adapter in ``adapter_dir`` or, without one, LoRA of rank 32 and
    alpha 64 on all linear layers but the output projection. The config's key ``adapter_dir`` loads
    the adapter's weights. ``quantize_base`` keeps all but embeddings and output projection in NF4.
    """
    given = {
        "lora_attn_modules": lora_attn_modules,
        "apply_lora_to_mlp": apply_lora_to_mlp,
        "apply_lora_to_output": apply_lora_to_output,
        "lora_rank": lora_rank,
        "lora_alpha": lora_alpha,
        "use_dora": use_dora,
    }
    start = _LORA if adapter_dir is None else adapter_settings(adapter_dir)
    lora = start | {name: value for name, value in given.items() if value is not None}
    hf = read_config(model_dir)
    adapted = _adapted_layers(lora, tied=hf.tie_word_embeddings)

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        quantized = quantize_base and name != "output"
        if quantized and inputs * outputs % (64 * 256):
            raise ValueError(
                "quantize_base=True: NF4 needs weights of a multiple of 16384 numbers, but "
                f"{name} has {outputs} x {inputs}; set it to False."
            )
        if name in adapted:
            kind = PeftDoRALinear if lora["use_dora"] else LoRALinear
            return kind(
                inputs,
                outputs,
                rank=lora["lora_rank"],
                alpha=lora["lora_alpha"],
                dropout=lora_dropout,
                use_bias=bias,
                quantize_base=quantized,
            )
        return (FrozenNF4Linear if quantized else nn.Linear)(inputs, outputs, bias=bias)

    model = _decoder(hf, linear)
    if quantize_base:  # as in torchtune's builders, a state dict has no NF4
        model._register_state_dict_hook(
            partial(
                reparametrize_as_dtype_state_dict_post_hook,
                dtype=model.tok_embeddings.weight.dtype,
                offload_to_cpu=True,
            )
        )
    return model


def _adapted_layers(lora: Mapping[str, Any], *, tied: bool) -> set[str]:
    names = {*lora["lora_attn_modules"]}
    if lora["apply_lora_to_mlp"]:
        names |= {"w1", "w2", "w3"}
    if lora["apply_lora_to_output"]:
        names.add("output")
        if tied:
            raise ValueError(
                "apply_lora_to_output=True: the model's output projection is its embedding; set it "
                "to False."
            )
    if not names:
        raise ValueError("lora_attn_modules=[]: no layer has an adapter; name at least one.")
    return names


def _decoder(hf: Any, linear: Linear) -> TransformerDecoder:
    def layer(name: str, inputs: int, outputs: int) -> nn.Module:
        return linear(name, inputs, outputs, has_bias(hf, name))

    gemma, width, hidden = is_gemma(hf), hf.hidden_size, hf.intermediate_size
    norm_kind: Any = GemmaRMSNorm if gemma else RMSNorm
    norm = partial(norm_kind, width, eps=hf.rms_norm_eps)
    embeddings = (GemmaNormEmbeddings if gemma else nn.Embedding)(hf.vocab_size, width)
    kinds = _layer_kinds(hf)
    rotations = {kind: HalfRotation(*_rotation(hf, kind)) for kind in set(kinds)}
    layers = [
        TransformerSelfAttentionLayer(
            _attention(hf, layer, rotations[kind], partial(norm_kind, eps=hf.rms_norm_eps)),
            FeedForward(
                gate_proj=layer("w1", width, hidden),
                down_proj=layer("w2", hidden, width),
                up_proj=layer("w3", width, hidden),
                activation=nn.GELU(approximate="tanh") if gemma else nn.SiLU(),
            ),
            sa_norm=norm(),
            mlp_norm=norm(),
            sa_scale=norm() if gemma else None,
            mlp_scale=norm() if gemma else None,
        )
        for kind in kinds
    ]
    tied = hf.tie_word_embeddings
    return TransformerDecoder(
        tok_embeddings=embeddings,
        layers=nn.ModuleList(layers),
        max_seq_len=context_length(hf),
        num_heads=hf.num_attention_heads,
        head_dim=head_dim(hf),
        norm=norm(),
        output=TiedLinear(embeddings) if tied else layer("output", width, hf.vocab_size),
    )


def _attention(
    hf: Any,
    layer: Callable[[str, int, int], nn.Module],
    rotation: nn.Module,
    norm: Callable[[int], nn.Module],
) -> MultiHeadAttention:
    size, heads = head_dim(hf), hf.num_attention_heads
    kv_heads = hf.num_key_value_heads or heads
    return NormFirstAttention(
        embed_dim=heads * size,  # only checked to be a multiple of num_heads
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        q_proj=layer("q_proj", hf.hidden_size, heads * size),
        k_proj=layer("k_proj", hf.hidden_size, kv_heads * size),
        v_proj=layer("v_proj", hf.hidden_size, kv_heads * size),
        output_proj=layer("output_proj", heads * size, hf.hidden_size),
        pos_embeddings=rotation,
        q_norm=norm(size) if has_qk_norm(hf) else None,
        k_norm=norm(size) if has_qk_norm(hf) else None,
        max_seq_len=context_length(hf),
    )


# --- What config.json says ----------------------------------------------------------------------


def read_config(model_dir: str | Path) -> Any:
    """Read a folder's config with transformers, whose defaults hold for keys it leaves out.

    Raises a ValueError that names the key if the model cannot be computed exactly.
    """
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
        hf = AutoConfig.from_pretrained(str(model_dir))
    except Exception as error:  # of any type: each key has its own validator
        raise ValueError(
            f"model_dir={model_dir}: transformers rejects its config.json: "
            f"{shortened(describe(error), 300)}. Fetch the model again, or correct the key."
        ) from error
    for key, value, remedy in _unsupported(given, hf):
        raise ValueError(f"model_dir={model_dir}: config.json says {key}={value!r}; {remedy}.")
    return hf


def is_gemma(hf: Any) -> bool:
    """Whether a model has norms around each block, scaled embeddings, and GELU."""
    return hf.model_type == GEMMA3


def has_qk_norm(hf: Any) -> bool:
    """Whether queries and keys are normalized, head by head, before they are rotated."""
    return hf.model_type in ("qwen3", GEMMA3)


def has_bias(hf: Any, name: str) -> bool:
    """Whether the linear layer that torchtune calls ``name`` has a bias."""
    match hf.model_type, name:
        case _, "output":
            return False
        case kind, "w1" | "w2" | "w3":
            return kind == "llama" and bool(hf.mlp_bias)
        case "qwen2", _:  # Qwen2 and Mistral ignore attention_bias
            return name != "output_proj"
        case "mistral", _:
            return False
    return bool(hf.attention_bias)


def head_dim(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def context_length(hf: Any) -> int:
    """Return the model's context, or its sliding window, in which all layers see everything."""
    if "sliding_attention" in _layer_kinds(hf):
        return min(hf.max_position_embeddings, hf.sliding_window)
    return hf.max_position_embeddings


def _unsupported(given: Mapping[str, Any], hf: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the keys whose effect is not implemented: name, value and remedy."""
    for name in hf.architectures or ():
        if not name.endswith("ForCausalLM"):
            yield "architectures", name, "only a causal language model can be trained"
    for key, harmless in _WITHOUT_EFFECT.items():
        value = getattr(hf, key, given.get(key))
        if value is not None and value not in harmless:
            yield key, value, "such a model is not supported"
    key = "hidden_activation" if is_gemma(hf) else "hidden_act"
    activation = "gelu_pytorch_tanh" if is_gemma(hf) else "silu"
    if getattr(hf, key) != activation:
        yield key, getattr(hf, key), f"supported is {activation}"
    if is_gemma(hf) and hf.query_pre_attn_scalar != head_dim(hf):
        yield "query_pre_attn_scalar", hf.query_pre_attn_scalar, "supported is head_dim"
    for name in _layer_kinds(hf):
        rope = _rope_parameters(hf, name)
        if rope["rope_type"] not in ("default", *_SCALED_ROTATIONS):
            kinds = f"supported are default, {', '.join(_SCALED_ROTATIONS)}"
            yield "rope_type", rope["rope_type"], kinds
        if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            yield "partial_rotary_factor", part, "such a model is not supported"


def _layer_kinds(hf: Any) -> list[str]:
    """Return ``full_attention`` or ``sliding_attention`` for each layer."""
    layers = hf.num_hidden_layers
    if getattr(hf, "layer_types", None):
        return list(hf.layer_types)
    every = getattr(hf, "sliding_window_pattern", layers + 1)  # Gemma's before transformers 5
    if getattr(hf, "sliding_window", None) is None or not getattr(hf, "use_sliding_window", True):
        every = 1
    return ["sliding_attention" if n % every else "full_attention" for n in range(1, layers + 1)]


def _rope_parameters(hf: Any, kind: str) -> dict[str, Any]:
    """Return ``rope_type``, ``rope_theta`` and so on for a kind of layer."""
    parameters = getattr(hf, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        parameters = dict(getattr(hf, "rope_scaling", None) or {})
        if kind == "sliding_attention" and hasattr(hf, "rope_local_base_freq"):
            parameters = {"rope_theta": hf.rope_local_base_freq}
        parameters.setdefault("rope_theta", hf.rope_theta)
    elif isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    return {"rope_type": parameters.get("type", "default"), **parameters}


def _rotation(hf: Any, kind: str) -> tuple[Tensor, float]:
    """Return frequencies [head_dim / 2] float32 and scale of cos and sin for a kind of layer."""
    parameters = _rope_parameters(hf, kind)
    with torch.device("cpu"):
        if parameters["rope_type"] == "default":
            exponents = torch.arange(0, head_dim(hf), 2).float() / head_dim(hf)
            return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        nested = kind in (getattr(hf, "rope_parameters", None) or ())
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        return compute(hf, "cpu", **({"layer_type": kind} if nested else {}))
