"""Folders of two-layer models with random weights, as transformers writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from policies import start_magnitudes
from transformers import AutoConfig, AutoModelForCausalLM

from torchtune_grpo.models import HFCheckpointer, hf_model
from torchtune_grpo.models.kinds import kind_of
from torchtune_grpo.models.layers import standardize

VOCAB = 300
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN_ROPE = dict(
    rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128
)
# Name -> model_type and what it has of its own; head_dim differs from hidden_size / heads in some.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3": ("llama", dict(rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True)),
    "llama_linear": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0), head_dim=10),
    ),
    "llama_biases": ("llama", dict(attention_bias=True, mlp_bias=True, num_attention_heads=2)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=20)),
    "mistral_window": ("mistral", dict(sliding_window=8)),
    "ministral": (
        "ministral",
        dict(head_dim=16, sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
    ),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2_untied": ("qwen2", dict()),
    "qwen3": ("qwen3", dict(tie_word_embeddings=True, head_dim=16)),
    "qwen3_untied": ("qwen3", dict(head_dim=24, attention_bias=True)),
    "qwen3_yarn": ("qwen3", dict(head_dim=16, rope_parameters=_YARN_ROPE)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0], tie_word_embeddings=True)),
    "olmo2": ("olmo2", dict()),
    "olmo3": ("olmo3", dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "granite": (
        "granite",
        dict(
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            tie_word_embeddings=True,
        ),
    ),
    "seed_oss": (
        "seed_oss",
        dict(head_dim=16, attention_out_bias=False),  # with dropouts, as published
    ),
    "ministral3": (
        "ministral3",
        dict(head_dim=16, rope_parameters=_YARN_ROPE | dict(llama_4_scaling_beta=0.1)),
    ),
    "phi3": ("phi3", dict(sliding_window=8)),
    "phi3_longrope": (
        "phi3",
        dict(
            max_position_embeddings=2048,
            original_max_position_embeddings=512,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                partial_rotary_factor=0.5,
                short_factor=[1.0, 1.5, 2.0],
                long_factor=[2.0, 3.0, 4.0],
                original_max_position_embeddings=512,
            ),
        ),
    ),
    "arcee": ("arcee", dict()),
    "glm": ("glm", dict(head_dim=16)),
    "glm4": ("glm4", dict(head_dim=16)),
    "nemotron": ("nemotron", dict(head_dim=16)),
    "starcoder2": (
        "starcoder2",
        dict(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, sliding_window=8),
    ),
    "cwm": (
        "cwm",
        dict(head_dim=16, sliding_window=8, layer_types=["full_attention", "sliding_attention"])
        | dict(rope_parameters=_LLAMA3_ROPE, bos_token_id=0, eos_token_id=1),
    ),
    "ernie4_5": ("ernie4_5", dict(head_dim=16, use_bias=True, tie_word_embeddings=True)),
    "exaone4": (
        "exaone4",
        dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    ),
    "exaone4_full": ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 2)),
    "granitemoehybrid": (
        "granitemoehybrid",
        dict(num_local_experts=0, shared_intermediate_size=72, position_embedding_type="rope")
        | dict(layer_types=["attention"] * 2, mamba_n_heads=2, tie_word_embeddings=True)
        | dict(embedding_multiplier=12.0, attention_multiplier=0.2)
        | dict(residual_multiplier=0.22, logits_scaling=8.0),
    ),
    "helium": ("helium", dict(head_dim=12, attention_bias=True)),
    "internlm3": ("internlm3", dict(head_dim=16, attention_bias=True, mlp_bias=True)),
    "iquestcoder": ("iquestcoder", dict(head_dim=16)),
    "jais2": ("jais2", dict()),
    "stablelm": ("stablelm", dict(num_attention_heads=2, use_qkv_bias=True)),
    "gemma": ("gemma", dict(head_dim=16, hidden_act="gelu", tie_word_embeddings=True)),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=8, tie_word_embeddings=True)
        | dict(
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=1e4),
                "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            },
        ),
    ),
}

_MAMBA = dict(mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=8)
# The same for types that are computed by transformers' own modules
BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5_text",
        dict(head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16)
        | dict(layer_types=["linear_attention", "full_attention"])
        | dict(linear_num_key_heads=2, linear_num_value_heads=4),
    ),
    "gemma4": (
        "gemma4_text",
        dict(head_dim=16, global_head_dim=32, sliding_window=8, tie_word_embeddings=True)
        | dict(layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0)
        | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
        | dict(final_logit_softcapping=3.0),
    ),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention"], tie_word_embeddings=True)),
    "gpt_oss": (
        "gpt_oss",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8)
        | dict(layer_types=["sliding_attention", "full_attention"])
        | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
    ),
    "falcon_h1": ("falcon_h1", _MAMBA | dict(mamba_d_ssm=64, mamba_n_heads=4, head_dim=16)),
    "gemma2": ("gemma2", dict(head_dim=16, sliding_window=8, tie_word_embeddings=True)),
}


def hf_folder(name: str, folder: Path, *, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Write the folder of a model of ``MODELS``, with ``changes`` to its config."""
    kind, settings = (MODELS | BY_TRANSFORMERS)[name]
    torch.manual_seed(0)
    with torch.device("cpu"):
        config = AutoConfig.for_model(kind, **(SHAPE | settings | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    scale = 1.4 if name in MODELS else 1.0  # recurrent layers would magnify rounding
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, and large enough to matter
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load(folder: Path, build: Callable[..., Any] = hf_model, **arguments: Any) -> Any:
    """Make a folder's model as a trainer has it, with adapters as they start."""
    model = build(str(folder), **arguments)
    standardize(model)
    weights = kind_of(model).read(HFCheckpointer(str(folder), ""), {})
    model.load_state_dict(weights, strict=build is hf_model)
    start_magnitudes(model)
    return model.eval()
