"""Models that every test can afford: two-layer Llama and Qwen shapes with random weights."""

import torch
from torch.nn import functional as F
from torchtune.models.llama3 import lora_llama3
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerDecoder

from torchtune_grpo.models import standardize
from torchtune_grpo.models.layers import pairs_to_halves
from torchtune_grpo.training import attend_in_segments

VOCAB = 61
SHAPE = dict(
    vocab_size=VOCAB,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=128,
)
LORA = dict(
    lora_attn_modules=["q_proj", "k_proj", "v_proj", "output_proj"],
    apply_lora_to_mlp=True,
    lora_rank=4,
    lora_alpha=8,
)


def randomize(model: TransformerDecoder, *, seed: int = 0) -> TransformerDecoder:
    """Gives every parameter a random value, LoRA's B matrices too, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.4 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
    return model


def build_policy(kind: str = "llama", dtype: torch.dtype = torch.float32) -> TransformerDecoder:
    """``"llama" | "untied" | "qwen" | "lora" | "dora" | "lora_output"`` -> a random policy."""
    builders = {
        "llama": lambda: llama3_2(**SHAPE),
        "untied": lambda: llama3_2(**SHAPE, tie_word_embeddings=False),
        "qwen": lambda: qwen2(**SHAPE, tie_word_embeddings=True),
        "lora": lambda: lora_llama3_2(**LORA, **SHAPE),
        "dora": lambda: lora_llama3_2(**LORA, **SHAPE, use_dora=True),
        "lora_output": lambda: lora_llama3(**LORA, **SHAPE, apply_lora_to_output=True),
    }
    torch.manual_seed(0)
    model = builders[kind]()
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    attend_in_segments(model)
    randomize(model)
    standardize(model)
    if kind != "qwen":  # whose rows have that order already
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model.load_state_dict(pairs_to_halves(model.state_dict(), heads))
    return model.to(dtype)


def full_logprobs(model: TransformerDecoder, tokens: torch.Tensor, temperature: float):
    """The plain way for one row: log-softmax of all logits; [T - 1] log-probs of tokens 1..T-1."""
    logits = model(tokens[None])[0, :-1].double() / temperature
    return -F.cross_entropy(logits, tokens[1:], reduction="none")
