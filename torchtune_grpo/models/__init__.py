"""A model from its folder, as the hub has it: builders, weights and tokenizer, by config.json."""

from torchtune_grpo.models._build import hf_model, lora_hf_model
from torchtune_grpo.models._modules import HalfRotation, NormFirstAttention, PlainBiasDoRALinear
from torchtune_grpo.models._tokenizer import HFTokenizer, hf_tokenizer
from torchtune_grpo.models._weights import HFCheckpointer

__all__ = [
    "HFCheckpointer",
    "HFTokenizer",
    "HalfRotation",
    "NormFirstAttention",
    "PlainBiasDoRALinear",
    "hf_model",
    "hf_tokenizer",
    "lora_hf_model",
]
