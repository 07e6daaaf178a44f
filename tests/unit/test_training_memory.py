"""Memory that autograd keeps for a packed group, and the estimate that counts it."""

import memory_estimate
import pytest
import torch
from policies import LORA, loaded_policy
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import cut
from torchtune_grpo.training.packing import attend_in_segments, packed_layout

CPU = torch.device("cpu")


def kept_numbers(*, dim: int, hidden: int, layers: int, vocab: int) -> tuple[list[int], int]:
    """Elements of each tensor kept for the backward pass, without parameters; and S."""
    model = lora_llama3_2(
        **LORA,
        vocab_size=vocab,
        num_layers=layers,
        num_heads=dim // 32,
        num_kv_heads=dim // 64,
        embed_dim=dim,
        intermediate_dim=hidden,
        max_seq_len=1024,
    )
    attend_in_segments(model)
    set_trainable_params(model, get_adapter_params(model))
    layout = packed_layout(make_groups([100], [80, 90, 60, 70]), torch.zeros(4, dtype=torch.long))
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        address = value.untyped_storage().data_ptr()
        if address not in known:
            kept[address] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        response_logprobs(model, layout, temperature=1.0)
    sizes = [value.untyped_storage().nbytes() // 4 for value in kept.values()]
    return sizes, layout.tokens.shape[1]


@pytest.mark.parametrize("dim, hidden", [(256, 768), (256, 1536), (512, 768)])
def test_kept_of_a_layer(dim, hidden):
    """7.5 D + 4 F numbers a token and layer, and 10% for what is small."""
    few, width = kept_numbers(dim=dim, hidden=hidden, layers=1, vocab=100)
    many, _ = kept_numbers(dim=dim, hidden=hidden, layers=3, vocab=100)
    per_layer = (sum(many) - sum(few)) / 2 / width
    assert per_layer == pytest.approx(7.5 * dim + 4 * hidden, rel=0.1)


def test_no_mask_is_kept_and_nothing_of_the_vocabularys_size():
    sizes, width = kept_numbers(dim=64, hidden=96, layers=3, vocab=5000)
    assert max(sizes) == width * 96  # a mask would have 396 * 396 numbers, the logits 300 * 5000


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_tensors_without_memory_are_counted_like_real_ones(tmp_path, rows, recompute):
    """Of the update as benchmarks/memory_estimate.py runs it; with 4 of 8 rows it is the second."""
    node = load_config("hf_lora_grpo")
    node.model_dir = str(memory_estimate.shape_folder(tmp_path, "shape-tiny"))
    node.merge_with(
        {"batch_size": 2, "grpo_samples": 4, "max_generated_tokens": 40, "forward_batch_size": rows}
    )
    node.enable_activation_checkpointing = recompute
    node.dataset.max_prompt_tokens = 64
    cfg = read_config(node)
    estimated, _ = memory_estimate.update_bytes(cfg, device=CPU)

    model = loaded_policy(cfg, memory_estimate.random_weights(cfg)).train()
    memory_estimate.checkpoint_layers(model, cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = cut(memory_estimate.longest_rows(cfg), cfg)
    for part in parts:
        with memory_estimate.LiveBytes(model) as live:
            logprobs, entropy = memory_estimate.log_probs(model, part, cfg)
            (logprobs + entropy).sum().backward()
    gradients = 0 if len(parts) > 1 else sum(p.numel() * p.itemsize for p in trained)
    assert live.peak - gradients == pytest.approx(estimated, rel=0.02)
