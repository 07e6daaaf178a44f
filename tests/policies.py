"""Models that every test can afford: two layers of many families with random weights."""

import torch
from torchtune.models.gemma import gemma
from torchtune.models.llama2 import llama2
from torchtune.models.llama3 import lora_llama3
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules import TransformerDecoder
from torchtune.training import set_default_dtype

from torchtune_grpo.models.layers import attend_in_segments, standardize
from torchtune_grpo.rollout.sampling import Sampler
from torchtune_grpo.trajectory import Trajectory

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
QUANTIZABLE = SHAPE | dict(num_kv_heads=4, embed_dim=128, intermediate_dim=128)
LORA = dict(
    lora_attn_modules=["q_proj", "k_proj", "v_proj", "output_proj"],
    apply_lora_to_mlp=True,
    lora_rank=4,
    lora_alpha=8,
)


def with_window(model: TransformerDecoder) -> TransformerDecoder:
    """Let the first layer see only four tokens."""
    model.layers[0].attn.window = 4
    return model


BUILDERS = {
    "llama": lambda: llama3_2(**SHAPE),
    "window": lambda: with_window(llama3_2(**SHAPE)),
    "untied": lambda: llama3_2(**SHAPE, tie_word_embeddings=False),
    "qwen": lambda: qwen2(**SHAPE, tie_word_embeddings=True),
    "lora": lambda: lora_llama3_2(**LORA, **SHAPE),
    "dora": lambda: lora_llama3_2(**LORA, **SHAPE, use_dora=True),
    "lora_output": lambda: lora_llama3(**LORA, **SHAPE, apply_lora_to_output=True),
    "dora_with_biases": lambda: lora_qwen2(**LORA, **SHAPE, use_dora=True),
    "qlora": lambda: lora_llama3(**LORA, **QUANTIZABLE, quantize_base=True),
    "qdora": lambda: lora_llama3(**LORA, **QUANTIZABLE, quantize_base=True, use_dora=True),
    "llama2": lambda: llama2(**SHAPE),
    "phi3": lambda: phi3(**SHAPE),
    "gemma": lambda: gemma(**SHAPE, head_dim=16),
}
# Those that differ in the update
KINDS = ("llama", "window", "untied", "qwen", "lora", "dora", "lora_output")


@torch.no_grad()
def randomize(model: TransformerDecoder) -> TransformerDecoder:
    """Give every parameter a random value large enough to matter, LoRA's B matrices too.

    B is smaller, so that the adapters do not outweigh the weights: gradients would be in the
    hundreds, and their rounding depend on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = (0.4 if "lora_b" in name else 1.4) * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif "magnitude" in name:
            parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
    return model


def start_magnitudes(model: torch.nn.Module) -> None:
    """Give DoRA's magnitudes the values that they start with."""
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()


def build_policy(kind: str = "llama", dtype: torch.dtype = torch.float32) -> TransformerDecoder:
    """Build a random policy of ``BUILDERS``, as the recipe prepares it."""
    torch.manual_seed(0)
    with set_default_dtype(dtype):
        model = BUILDERS[kind]()
    start_magnitudes(model)
    randomize(model)
    standardize(model)
    attend_in_segments(model)
    return model


def next_token(model: TransformerDecoder, sampler: Sampler, prompt, response, noise):
    """Sample from the whole row's logits: the token, and (sampled, the sampler's log-probs)."""
    seen = torch.zeros(1, model.tok_embeddings.num_embeddings, dtype=torch.bool)
    seen[0, prompt + response] = True
    token, *logprobs = sampler(
        model(torch.tensor([prompt + response]))[:, -1],
        uniforms=noise[len(response), None],
        counts=torch.tensor([len(response)]),
        seen=seen,
    )
    return int(token), (True, *map(float, logprobs))


def full_logprobs(model: TransformerDecoder, tokens: torch.Tensor, temperature: float):
    """Compute [2, T - 1] log-probs of tokens 1..T-1 and entropy of one row from all its logits."""
    log_p = (model(tokens[None])[0, :-1].double() / temperature).log_softmax(dim=-1)
    logprobs = log_p.gather(1, tokens[1:, None])[:, 0]
    return torch.stack([logprobs, -(log_p.exp() * log_p).sum(dim=-1)])


def response_rows(model: TransformerDecoder, trajectory: Trajectory, temperature: float):
    """Compute [2, N, L] log-probs and entropy row by row from all logits, 0 where masked."""
    mask = trajectory.response_mask
    result = torch.zeros(2, *mask.shape, dtype=torch.float64)
    lengths = zip(trajectory.prompt_lengths.tolist(), trajectory.response_lengths.tolist())
    for row, (prompt, response) in enumerate(lengths):
        values = full_logprobs(model, trajectory.tokens[row, : prompt + response], temperature)
        result[:, row, :response] = values[:, prompt - 1 :]
    return result.where(mask, 0)
