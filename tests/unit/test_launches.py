"""How many operations a decoding step of Llama 3.2 1B launches on a GPU."""

import pytest
import torch
from launches import LLAMA_1B, build, counted, counting_cuda, decoding
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize(("way", "most"), [("lora", 480), ("full", 400)])
def test_a_decoding_step_launches_few_operations(way: str, most: int):
    model = build(way, LLAMA_1B)
    with counting_cuda(), torch.no_grad():
        model.to_empty(device="cuda")
        counts = decoding(model, merge=False, rows=32)
    for name in ("decode_eager", "decode_captured"):
        assert counts[name].count <= most, (name, counts[name].names.most_common())
        assert counts[name].copies_in == 0
    assert counts["sampling"].count <= 25, counts["sampling"].names.most_common()


def test_what_launches_on_cuda_counts_once_and_views_do_not():
    with counting_cuda():
        norm = nn.RMSNorm(64, device="cuda", dtype=torch.bfloat16)
        q = torch.empty(1, 8, 16, 64, device="cuda", dtype=torch.bfloat16)
        mask = torch.empty(16, 16, device="cuda", dtype=torch.bfloat16)

        def work() -> None:
            F.scaled_dot_product_attention(norm(q), q, q, is_causal=True)
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            mask.view(8, 32).transpose(0, 1)[1:].unsqueeze(0).expand(2, -1, -1).detach()
            mask.t().add_(1)

        assert counted(work).names == {
            "aten._fused_rms_norm.default": 1,
            "aten._scaled_dot_product_flash_attention.default": 1,
            "aten._scaled_dot_product_efficient_attention.default": 1,
            "aten.add_.Tensor": 1,
        }
        assert counted(lambda: torch.tensor([1, 2], device="cuda")).copies_in == 1
        assert counted(lambda: torch.zeros(2, device="cuda") + 1).copies_in == 0
