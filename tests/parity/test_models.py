"""Models from a folder compute what transformers computes: logits, tokens, adapters, exports."""

import pytest
import torch
from hf_models import MODELS, VOCAB, hf_folder
from transformers import AutoModelForCausalLM

from torchtune_grpo.models import HFCheckpointer, hf_model

TOKENS = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(3))


def load(folder, build=hf_model, **arguments):
    """A model with the folder's weights; adapters keep their start."""
    model = build(str(folder), **arguments)
    state = HFCheckpointer(str(folder), str(folder / "out")).load_checkpoint()["model"]
    model.load_state_dict(state, strict=build is hf_model)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits(tmp_path, name):
    folder = hf_folder(name, tmp_path / name, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(load(folder)(TOKENS), expected, atol=1e-4, rtol=1e-4)
