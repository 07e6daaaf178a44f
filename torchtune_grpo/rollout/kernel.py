"""Decoding attention as one Triton kernel; KernelAttention says what it computes.

Triton comes with torch's CUDA builds; nothing else imports this module.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILE_BYTES = 16384  # of keys; with values and the next tiles of both, fits any card since Ampere


def launch(heads: Tensor, prompts: Tensor, rows: Tensor, *others: object) -> Tensor:
    """Run one program for each row and head of keys and values."""
    kv_heads, width, head_dim = rows.shape[2:]
    group = heads.shape[1] // kv_heads - 2
    out = heads.new_empty(len(heads), kv_heads * group * head_dim)
    strides = heads.stride(0), prompts.stride(0), rows.stride(0)
    sizes = prompts.shape[3], width, head_dim**-0.5
    options = constants(kv_heads, group=group, head_dim=head_dim, itemsize=heads.element_size())
    grid = len(heads), kv_heads
    _kernel[grid](out, heads, prompts, rows, *others, *strides, *sizes, **options, num_stages=2)
    return out


def constants(kv_heads: int, *, group: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """Return the constants that the kernel is compiled for."""
    padded_dim = max(16, triton.next_power_of_2(head_dim))  # matrix units need at least 16
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_GROUP": max(16, triton.next_power_of_2(group)),
        "PADDED_DIM": padded_dim,
        "BLOCK": min(max(_TILE_BYTES // (padded_dim * itemsize), 16), 128),
    }


@triton.jit
def _kernel(
    out,
    heads,
    prompts,
    rows,
    slots,
    prompt_slots,
    prompt_lengths,
    last,
    token_positions,
    table,
    window,
    token_stride,
    prompts_stride,  # from keys to values
    rows_stride,
    prompt_width,
    width,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a head of keys and values
    HEAD_DIM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # positions that are read at once
):
    row = tl.program_id(0).to(tl.int64)  # a cache may have more than 2**31 entries
    kv_head = tl.program_id(1)
    query_heads = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    in_group = (query_heads < GROUP)[:, None] & in_head

    queries = heads + row * token_stride + (kv_head * GROUP + query_heads)[:, None] * HEAD_DIM
    key = heads + row * token_stride + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
    q = tl.load(queries + dims, mask=in_group, other=0.0)
    new_key = tl.load(key + dims, mask=in_head, other=0.0)
    new_value = tl.load(key + KV_HEADS * HEAD_DIM + dims, mask=in_head, other=0.0)
    if table is not None:
        turn = table + tl.load(token_positions + row) * 2 * HEAD_DIM + dims
        cos = tl.load(turn, mask=in_head, other=0.0).to(tl.float32)
        sin = tl.load(turn + HEAD_DIM, mask=in_head, other=0.0).to(tl.float32)
        partners = (dims + HEAD_DIM // 2) % HEAD_DIM
        q_partners = tl.load(queries + partners, mask=in_group, other=0.0)
        key_partners = tl.load(key + partners, mask=in_head, other=0.0)
        q = (q * cos + q_partners * sin).to(q.dtype)
        new_key = (new_key * cos + key_partners * sin).to(new_key.dtype)

    slot, prompt_slot = tl.load(slots + row), tl.load(prompt_slots + row)
    own = rows + (slot * KV_HEADS + kv_head) * width * HEAD_DIM
    shared = prompts + (prompt_slot * KV_HEADS + kv_head) * prompt_width * HEAD_DIM
    count = tl.load(last + row)  # tokens of the response that are cached
    new = own + count * HEAD_DIM + dims
    tl.store(new, new_key, mask=in_head)
    tl.store(new + rows_stride, new_value, mask=in_head)

    # An online softmax, which begins with the new token: ``peak`` is the largest score so far,
    # ``total`` the sum of exp(score - peak), ``mean`` the sum of the values with these weights.
    peak = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1) * scale
    total = tl.full([PADDED_GROUP], 1.0, tl.float32)
    mean = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32) + new_value.to(tl.float32)
    prompt_length = tl.load(prompt_lengths + row)
    for part in tl.static_range(2):
        if part == 0:
            keys, to_values, before, length = shared, prompts_stride, 0, prompt_length
        else:
            keys, to_values, before, length = own, rows_stride, prompt_length, count
        first = 0  # of these keys
        if window is not None:
            first = tl.maximum(prompt_length + count + 1 - window - before, 0)
        for start in range(first, length, BLOCK):
            positions = start + tl.arange(0, BLOCK)
            is_cached = positions < length
            at = keys + positions[:, None] * HEAD_DIM + dims
            mask = is_cached[:, None] & in_head
            k = tl.load(at, mask=mask, other=0.0)
            v = tl.load(at + to_values, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(is_cached, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            kept = tl.exp(peak - new_peak)
            weights = tl.exp(scores - new_peak[:, None])
            total = total * kept + tl.sum(weights, 1)
            mean *= kept[:, None]
            mean += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            peak = new_peak
    mean /= total[:, None]
    out += (row * KV_HEADS * GROUP + (kv_head * GROUP + query_heads)[:, None]) * HEAD_DIM
    tl.store(out + dims, mean.to(out.dtype.element_ty), mask=in_group)
