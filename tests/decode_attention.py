"""Reference for the decoding kernel, in torch operators; importing it registers it for CPUs."""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune_grpo.rollout.attention import OPERATOR
from torchtune_grpo.trajectory import length_mask


def decode_attention(
    heads: Tensor,
    prompts: Tensor,
    rows: Tensor,
    slots: Tensor,
    prompt_slots: Tensor,
    prompt_lengths: Tensor,
    last: Tensor,
    positions: Tensor,
    table: Tensor | None,
    window: int | None,
) -> Tensor:
    """Attention over each row's prompt, response and new token, which it rotates and caches."""
    kv, half = rows.shape[2], heads.shape[2] // 2
    if table is not None:
        cos, sin = table[positions].unbind(dim=1)  # [n, 1, hd] each
        turned = heads * cos + heads.roll(half, dims=-1) * sin
        heads = torch.cat([turned[:, :-kv], heads[:, -kv:]], dim=1)
    q, new = heads.tensor_split((heads.shape[1] - 2 * kv,), dim=1)
    rows[:, slots, :, last] = new.unflatten(1, (2, kv))
    cached = [prompts[:, prompt_slots], rows[:, slots]]
    keys, values = torch.cat(cached, dim=3)  # [n, kv, P + C, hd]
    seen = [length_mask(prompt_lengths, prompts.shape[3]), length_mask(last + 1, rows.shape[3])]
    mask = torch.cat(seen, dim=1)  # [n, P + C]
    if window is not None:  # positions - window + 1 to positions
        of_prompt = torch.arange(prompts.shape[3]).expand(len(last), -1)
        of_row = prompt_lengths[:, None] + torch.arange(rows.shape[3])
        mask &= torch.cat([of_prompt, of_row], dim=1) > positions[:, None] - window
    mask = mask[:, None, None]
    attend = F.scaled_dot_product_attention
    return attend(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True).flatten(1)


torch.library.impl(OPERATOR, "cpu", decode_attention)
