"""Models from a folder, as the hub has them: builders, weights, adapters and tokenizers."""

from torchtune_grpo.models.adapter import (
    adapter_files,
    adapter_names,
    adapter_settings,
    check_adapter,
    merge_adapter,
    merged_state,
    read_adapter,
    save_adapter,
)
from torchtune_grpo.models.build import hf_model, lora_hf_model
from torchtune_grpo.models.layers import (
    HalfRotation,
    NormFirstAttention,
    PeftDoRALinear,
    standardize,
    unembed_with,
)
from torchtune_grpo.models.tokenizer import HFTokenizer, hf_tokenizer
from torchtune_grpo.models.weights import (
    HFCheckpointer,
    hf_config_of,
    hf_state,
    load_weights,
    save_weights,
)

__all__ = [
    "HFCheckpointer",
    "HFTokenizer",
    "HalfRotation",
    "NormFirstAttention",
    "PeftDoRALinear",
    "adapter_files",
    "adapter_names",
    "adapter_settings",
    "check_adapter",
    "hf_config_of",
    "hf_model",
    "hf_state",
    "hf_tokenizer",
    "load_weights",
    "lora_hf_model",
    "merge_adapter",
    "merged_state",
    "read_adapter",
    "save_adapter",
    "save_weights",
    "standardize",
    "unembed_with",
]
