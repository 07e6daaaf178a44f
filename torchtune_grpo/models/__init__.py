"""A model from its folder, as the hub has it: builders, weights and tokenizer, by config.json.

And adapters and merged weights in the forms that PEFT and transformers load.
"""

from torchtune_grpo.models.adapter import (
    adapter_files,
    adapter_settings,
    check_adapter,
    merge_adapter,
    read_adapter,
)
from torchtune_grpo.models.build import hf_model, lora_hf_model
from torchtune_grpo.models.export import (
    adapter_names,
    fits_peft,
    merged_state,
    peft_config,
    peft_state,
)
from torchtune_grpo.models.modules import (
    HalfRotation,
    NormFirstAttention,
    PlainBiasDoRALinear,
    ScaledBiasDoRALinear,
    widen_adapters,
)
from torchtune_grpo.models.tokenizer import HFTokenizer, hf_tokenizer
from torchtune_grpo.models.weights import HFCheckpointer, hf_state

__all__ = [
    "HFCheckpointer",
    "HFTokenizer",
    "HalfRotation",
    "NormFirstAttention",
    "PlainBiasDoRALinear",
    "ScaledBiasDoRALinear",
    "adapter_files",
    "adapter_names",
    "adapter_settings",
    "check_adapter",
    "fits_peft",
    "hf_model",
    "hf_state",
    "hf_tokenizer",
    "lora_hf_model",
    "merge_adapter",
    "merged_state",
    "peft_config",
    "peft_state",
    "read_adapter",
    "widen_adapters",
]
