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
from torchtune_grpo.models.architecture import (
    context_length,
    has_bias,
    has_qk_norm,
    head_dim,
    is_gemma,
    layer_rotations,
    read_config,
)
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
    """The same with LoRA, DoRA or QLoRA; the arguments are those of torchtune's builders.

    None is the setting of the adapter in ``adapter_dir``; without one, LoRA of rank 32 and alpha 64
    on all linear layers but the output projection. The adapter's weights are loaded by the config's
    key ``adapter_dir``. ``quantize_base`` keeps all but embeddings and output projection in NF4.
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
    kind: Any = GemmaRMSNorm if gemma else RMSNorm
    norm = partial(kind, width, eps=hf.rms_norm_eps)
    embeddings = (GemmaNormEmbeddings if gemma else nn.Embedding)(hf.vocab_size, width)
    rotations = layer_rotations(hf)
    modules = {id(rotation): HalfRotation(*rotation) for rotation in rotations}
    layers = [
        TransformerSelfAttentionLayer(
            _attention(hf, layer, modules[id(rotation)], partial(kind, eps=hf.rms_norm_eps)),
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
        for rotation in rotations
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
    kind = NormFirstAttention if has_qk_norm(hf) else MultiHeadAttention
    return kind(
        embed_dim=heads * size,  # which is only checked to be a multiple of num_heads
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
