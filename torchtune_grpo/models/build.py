"""Builders for ``model._component_``: a model of torchtune's modules, as ``config.json`` says.

Parameters have torchtune's names and Hugging Face's order of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
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

from torchtune_grpo.models.adapter import adapter_settings
from torchtune_grpo.models.architecture import Architecture, read_architecture
from torchtune_grpo.models.layers import HalfRotation, NormFirstAttention, PeftDoRALinear

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
    """A model for full fine-tuning, as ``config.json`` in ``model_dir`` says."""

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias)

    return _decoder(read_architecture(model_dir), linear)


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
    """The same with LoRA, DoRA or QLoRA; the arguments are those of torchtune's builders.

    What is None is taken from the adapter in ``adapter_dir``; without one, it is LoRA of rank 32
    and alpha 64 on all linear layers but the output projection. The weights in ``adapter_dir`` are
    loaded by the config's key of this name. ``quantize_base`` has all but embeddings and output
    projection in 4 bits (NF4).
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
    architecture = read_architecture(model_dir)
    adapted = _adapted_layers(lora, tied=architecture.tied)

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

    model = _decoder(architecture, linear)
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


def _decoder(a: Architecture, linear: Linear) -> TransformerDecoder:
    kind: Any = GemmaRMSNorm if a.is_gemma else RMSNorm
    norm = partial(kind, a.embed_dim, eps=a.norm_eps)
    rotations = {id(rotation): HalfRotation(*rotation) for rotation in a.rotations}  # shared
    embeddings = (GemmaNormEmbeddings if a.is_gemma else nn.Embedding)(a.vocab_size, a.embed_dim)
    layers = []
    for rotation in a.rotations:
        layers.append(
            TransformerSelfAttentionLayer(
                _attention(a, linear, rotations[id(rotation)], norm=kind),
                FeedForward(
                    gate_proj=linear("w1", a.embed_dim, a.intermediate_dim, a.mlp_bias),
                    down_proj=linear("w2", a.intermediate_dim, a.embed_dim, a.mlp_bias),
                    up_proj=linear("w3", a.embed_dim, a.intermediate_dim, a.mlp_bias),
                    activation=nn.GELU(approximate="tanh") if a.is_gemma else nn.SiLU(),
                ),
                sa_norm=norm(),
                mlp_norm=norm(),
                sa_scale=norm() if a.is_gemma else None,
                mlp_scale=norm() if a.is_gemma else None,
            )
        )
    output = linear("output", a.embed_dim, a.vocab_size, False) if not a.tied else None
    return TransformerDecoder(
        tok_embeddings=embeddings,
        layers=nn.ModuleList(layers),
        max_seq_len=a.max_seq_len,
        num_heads=a.num_heads,
        head_dim=a.head_dim,
        norm=norm(),
        output=output or TiedLinear(embeddings),
    )


def _attention(
    a: Architecture, linear: Linear, rotation: nn.Module, *, norm: Any
) -> MultiHeadAttention:
    q_dim, kv_dim = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    kind = NormFirstAttention if a.has_qk_norm else MultiHeadAttention
    return kind(
        embed_dim=q_dim,  # which is only checked to be a multiple of num_heads
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        q_proj=linear("q_proj", a.embed_dim, q_dim, a.qkv_bias),
        k_proj=linear("k_proj", a.embed_dim, kv_dim, a.qkv_bias),
        v_proj=linear("v_proj", a.embed_dim, kv_dim, a.qkv_bias),
        output_proj=linear("output_proj", q_dim, a.embed_dim, a.output_bias),
        pos_embeddings=rotation,
        q_norm=norm(a.head_dim, eps=a.norm_eps) if a.has_qk_norm else None,
        k_norm=norm(a.head_dim, eps=a.norm_eps) if a.has_qk_norm else None,
        max_seq_len=a.max_seq_len,
    )
