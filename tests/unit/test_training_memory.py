"""Memory that autograd keeps for a packed group, estimates of it, and what they decide."""

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from policies import LORA, build_policy
from torch import nn
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups
from transformers import GPT2Config

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.models.auto import transformers_model
from torchtune_grpo.models.layers import attend_in_segments
from torchtune_grpo.run import Run
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.memory import choose_passes, pass_bytes
from torchtune_grpo.training.packing import packed_layout

CPU = torch.device("cpu")


def kept_numbers(
    *, dim: int, hidden: int, layers: int, vocab: int
) -> tuple[list[int], int, nn.Module]:
    """Elements of each tensor kept for the backward pass, without parameters; S; and the model."""
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
    layout = packed_layout(make_groups([100], [80, 90, 60, 70]), [0] * 4)
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
    return sizes, layout.tokens.shape[1], model


@pytest.mark.parametrize("dim, hidden", [(256, 768), (256, 1536), (512, 768)])
def test_kept_of_a_layer(dim, hidden):
    """7.5 D + 4 F numbers a token, 10% for what is small; auto counts up to twice it."""
    few, width, smaller = kept_numbers(dim=dim, hidden=hidden, layers=1, vocab=100)
    many, _, larger = kept_numbers(dim=dim, hidden=hidden, layers=3, vocab=100)
    per_layer = (sum(many) - sum(few)) / 2 / width
    assert per_layer == pytest.approx(7.5 * dim + 4 * hidden, rel=0.1)
    estimates = [pass_bytes(model, tokens=1, recompute=False) for model in (smaller, larger)]
    assert 1 < (estimates[1] - estimates[0]) / 2 / 4 / per_layer < 2.1


def test_no_mask_is_kept_and_nothing_of_the_vocabularys_size():
    sizes, width, _ = kept_numbers(dim=64, hidden=96, layers=3, vocab=5000)
    assert max(sizes) == width * 96  # a mask would have 396 * 396 numbers, the logits 300 * 5000


AUTO = {"forward_batch_size": "auto", "enable_activation_checkpointing": "auto"}
ROWS_ONLY = AUTO | {"enable_activation_checkpointing": False}
STEP = {"batch_size": 4, "grpo_samples": 4, "max_generated_tokens": 30}
LONGEST = 50


def settings(**changes):
    return read_config(load_config("tiny_arithmetic_grpo")).replace(**STEP | changes)


def size(rows: int, *, recompute: bool) -> int:
    """Free memory that is just enough for a pass over so many rows."""
    model = build_policy()
    return 2 * pass_bytes(model, tokens=rows * LONGEST, recompute=recompute)


CHOICES = {
    "nothing is known": (AUTO, None, (4, True)),
    "all fits": (AUTO, size(16, recompute=False), (16, False)),
    "nearly all fits": (AUTO, size(16, recompute=False) - 2, (15, False)),
    "a group fits": (AUTO, size(4, recompute=False), (4, False)),
    "a group does not fit": (AUTO, size(4, recompute=False) - 2, (10, True)),
    "less fits": (AUTO, size(3, recompute=True), (3, True)),
    "nothing fits": (AUTO, 0, (1, True)),
    "rows are given": (AUTO | {"forward_batch_size": 2}, size(2, recompute=False), (2, False)),
    "rows are given and do not fit": (AUTO | {"forward_batch_size": 5}, 0, (5, True)),
    "only rows are asked for": (ROWS_ONLY, size(2, recompute=False), (2, False)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_passes_are_chosen_by_the_memory_that_is_free(name):
    keys, free, (rows, recompute) = CHOICES[name]
    given = settings(**{"forward_batch_size": None} | keys)
    cfg = choose_passes(given, build_policy(), longest=LONGEST, free=free)
    assert (cfg.forward_batch_size, cfg.enable_activation_checkpointing) == (rows, recompute)


def test_attention_that_transformers_computes_may_have_no_norms(tmp_path):
    GPT2Config(n_embd=32, n_layer=2, n_head=2).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers_model(str(tmp_path))
    less, more = (pass_bytes(model, tokens=9, recompute=r) for r in (True, False))
    assert 0 < less < more


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", ["all fits", "a group does not fit"])
def test_a_run_takes_what_fits_its_card(name, device, monkeypatch):
    """Beside gradients and optimizer; on a CPU it recomputes layers, and takes a group."""
    _, free, (rows, recompute) = CHOICES[name]
    model, run = build_policy(), object.__new__(Run)
    trained = sum(p.numel() for p in model.parameters())
    node = "optimizer={_component_: torch.optim.AdamW, lr: 1e-4}"
    run.cfg = read_config(load_config("tiny_arithmetic_grpo", [node])).replace(**STEP | AUTO)
    run.device, run.is_sharded = device, False
    run._longest_prompt = LONGEST - STEP["max_generated_tokens"]
    free += 3 * 4 * trained  # float32: gradients and two moments
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    with fake_cuda():
        run._prepare_passes(model.to(device), ())
    found = run.cfg.forward_batch_size, run.cfg.enable_activation_checkpointing
    assert found == ((4, True) if device == CPU else (rows, recompute))
    wrapped = any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    assert wrapped == found[1]
