"""Models from a folder in the hub's format: builders, weights, adapters and tokenizers."""

from torchtune_grpo.models.auto import transformers_model
from torchtune_grpo.models.build import hf_model, lora_hf_model
from torchtune_grpo.models.tokenizer import hf_tokenizer
from torchtune_grpo.models.weights import HFCheckpointer

__all__ = ["HFCheckpointer", "hf_model", "hf_tokenizer", "lora_hf_model", "transformers_model"]
