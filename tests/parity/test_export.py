"""What a checkpoint folder holds gives the same logits in transformers and PEFT as in training."""

import json

import pytest
import torch
from checkpoints import TINY, llama_checkpoint, qwen_checkpoint
from omegaconf import OmegaConf
from peft import PeftModel
from policies import LORA, randomize
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.qwen2 import lora_qwen2
from transformers import AutoModelForCausalLM

from torchtune_grpo.checkpoint import Checkpoints

QWEN = {"rope_base": 1_000_000.0, "tie_word_embeddings": True}
CASES = {
    "lora": (llama_checkpoint, "LLAMA3_2", lambda: lora_llama3_2(**LORA, **TINY)),
    "dora": (llama_checkpoint, "LLAMA3_2", lambda: lora_llama3_2(**LORA, **TINY, use_dora=True)),
    "qwen": (qwen_checkpoint, "QWEN2", lambda: lora_qwen2(**LORA, **TINY, **QWEN)),
    "qwen_dora": (
        qwen_checkpoint,
        "QWEN2",
        lambda: lora_qwen2(**LORA, **TINY, **QWEN, use_dora=True),
    ),
    "full": (llama_checkpoint, "LLAMA3_2", lambda: llama3_2(**TINY)),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_saved_folder_equals_the_live_policy(tmp_path, case):
    make_folder, model_type, builder = CASES[case]
    base = make_folder(tmp_path / "base")
    cfg = OmegaConf.create(
        {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "checkpoint_files": ["model.safetensors"],
            "model_type": model_type,
        }
    )
    checkpoints = Checkpoints(cfg, output_dir=tmp_path / "out")
    model = builder()
    model.load_state_dict(checkpoints.base_weights(), strict=False)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora" in name or case == "full":
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        elif "magnitude" in name:
            parameter.mul_(1 + torch.rand(parameter.shape, generator=generator))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    folder = checkpoints.save(model, {"step": 3}, step=3)
    assert folder == tmp_path / "out" / "step_000003"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"saving changed {name}"

    tokens = torch.arange(40).view(2, 20) * 6 % 250
    expected = model(tokens)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(merged(tokens).logits, expected, atol=2e-4, rtol=1e-4)
    if case in ("full", "qwen_dora"):  # DoRA on a layer with a bias has no form in PEFT
        assert not (folder / "adapter").exists()
        return
    unadapted = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (unadapted(tokens).logits - expected).abs().max() > 0.1
    adapted = PeftModel.from_pretrained(unadapted, folder / "adapter")
    torch.testing.assert_close(adapted(tokens).logits, expected, atol=2e-4, rtol=1e-4)
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["use_dora"] is ("dora" in case)


def test_randomize_reaches_lora():
    """Guards the test above: adapters at their zero start would make it pass for nothing."""
    model = randomize(lora_llama3_2(**LORA, **TINY))
    assert model.layers[0].attn.q_proj.lora_b.weight.abs().min() > 0
