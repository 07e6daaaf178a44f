"""The policy's layers as the rollout runs them: packed prefill, and one token for every live row.

It reads the modules of an unmodified torchtune ``TransformerDecoder`` (embedding, norms, positional
embeddings and activations are called as they are) and brings its own attention: a group's prompt
has one copy of keys and values, grouped-query heads are not expanded, and only the filled part of
the cache is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from torchtune_grpo.rollout._cache import CacheShape, GroupCache
from torchtune_grpo.rollout._projection import KINDS, Projection


def unsupported_reason(model: TransformerDecoder) -> str | None:
    """What the native engine does not recognise in a model; None if it can run it."""
    if type(model) is not TransformerDecoder:
        return f"the model is a {type(model).__name__}"
    if model.num_output_chunks or model.output_hidden_states:
        return "the model returns chunks or hidden states"
    if type(model.output) not in KINDS:
        return f"its output projection is a {type(model.output).__name__}"
    for index, layer in enumerate(model.layers):
        if type(layer) is not TransformerSelfAttentionLayer:
            return f"layer {index} is a {type(layer).__name__}"
        attn, mlp = layer.attn, layer.mlp
        if type(attn) is not MultiHeadAttention or not attn.is_causal:
            return f"layer {index}'s attention is a {type(attn).__name__}"
        if type(mlp) is not FeedForward:
            return f"layer {index}'s feed-forward is a {type(mlp).__name__}"
        for module in (attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj, mlp.w1, mlp.w2):
            if type(module) not in KINDS:
                return f"layer {index} has a {type(module).__name__}"
    return None


@dataclass
class RowState:
    """The live rows of one decoding step, n of them.

    Attributes:
        tokens (Tensor): [n] the last sampled tokens.
        counts (Tensor): [n] sampled tokens so far, that one included.
        prompts (Tensor): [n] where each row's prompt lies in the cache.
        columns (Tensor): [n] the row's place among the rows of its prompt.
        prompt_lengths (Tensor): [prompts].
        prompt_width (int): the longest of them.
        width (int): the largest count.
        group_width (int): the most rows that a prompt has.
    """

    tokens: Tensor
    counts: Tensor
    prompts: Tensor
    columns: Tensor
    prompt_lengths: Tensor
    prompt_width: int
    width: int
    group_width: int


@dataclass
class _Layer:
    module: TransformerSelfAttentionLayer
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    gate: Projection
    down: Projection
    up: Projection | None


class NativeDecoder:
    """Runs a model that :func:`unsupported_reason` finds nothing in.

    Args:
        model (TransformerDecoder): the policy; its weights are read, never changed.
        merge_adapters (bool): see :class:`Projection`.
        dtype (torch.dtype): what to compute in.
        copy (bool): see :class:`Projection`.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        *,
        merge_adapters: bool,
        dtype: torch.dtype,
        copy: bool = True,
    ) -> None:
        def project(module: Any) -> Projection:
            return Projection(module, merge=merge_adapters, dtype=dtype, copy=copy)

        self._embed = model.tok_embeddings
        self._norm = model.norm
        self._output = project(model.output)
        self._dtype = dtype
        self._layers = [
            _Layer(
                module=layer,
                q=project(layer.attn.q_proj),
                k=project(layer.attn.k_proj),
                v=project(layer.attn.v_proj),
                out=project(layer.attn.output_proj),
                gate=project(layer.mlp.w1),
                down=project(layer.mlp.w2),
                up=None if layer.mlp.w3 is None else project(layer.mlp.w3),
            )
            for layer in model.layers
        ]
        attn = model.layers[0].attn
        self.cache_shape = CacheShape(
            layers=len(self._layers),
            kv_heads=attn.num_kv_heads,
            head_dim=attn.head_dim,
            dtype=dtype,
            device=next(model.parameters()).device,
        )

    def projections(self) -> Iterator[Projection]:
        """All linear layers."""
        for layer in self._layers:
            for entry in fields(layer):
                value = getattr(layer, entry.name)
                if isinstance(value, Projection):
                    yield value
        yield self._output

    def unembed(self, h: Tensor) -> Tensor:
        """h [K, D] -> logits [K, V], which may be a transposed view."""
        return self._output(self._norm(h))

    def prefill(self, prompts: list[Tensor], slots: list[int], cache: GroupCache) -> Tensor:
        """Runs prompts side by side, without padding, and caches their keys and values.

        Args:
            prompts (list[Tensor]): token ids, each [length].
            slots (list[int]): where in the cache each of them goes.
            cache (GroupCache): with room for them.

        Returns:
            Tensor: [prompts, V] logits of the token behind each prompt.
        """
        device = prompts[0].device
        lengths = [len(prompt) for prompt in prompts]
        spans = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        h = self._embed(torch.cat(prompts)).to(self._dtype)  # [S, D], S tokens of all prompts
        for index, layer in enumerate(self._layers):
            keys, values = cache.prompt_keys[index], cache.prompt_values[index]

            def attend(q: Tensor, k: Tensor, v: Tensor, keys=keys, values=values) -> Tensor:
                out = torch.empty_like(q)
                for span, slot in zip(spans, slots, strict=True):
                    length = span.stop - span.start
                    keys[slot, :, :length] = k[span].transpose(0, 1)
                    values[slot, :, :length] = v[span].transpose(0, 1)
                    keys[slot, :, length:] = 0
                    values[slot, :, length:] = 0
                    out[span] = _causal_attention(q[span], k[span], v[span])
                return out

            h = self._run_layer(layer, h, positions.T, attend)
        last = torch.tensor([span.stop - 1 for span in spans], device=device)
        return self.unembed(h[last])

    def decode(self, rows: RowState, cache: GroupCache) -> Tensor:
        """Feeds every live row its last token.

        Args:
            rows (RowState): n rows.
            cache (GroupCache): holds their prompts and earlier tokens; receives this one.

        Returns:
            Tensor: [n, V] logits of the next token.
        """
        n = len(rows.tokens)
        positions = (rows.prompt_lengths[rows.prompts] + rows.counts - 1)[:, None]  # [n, 1]
        attention = _GroupAttention(rows)
        index_n = torch.arange(n, device=rows.tokens.device)
        h = self._embed(rows.tokens).to(self._dtype)  # [n, D]
        for index, layer in enumerate(self._layers):
            row_keys, row_values = cache.keys[index][:n], cache.values[index][:n]
            prompt_keys = cache.prompt_keys[index][:, :, : rows.prompt_width]
            prompt_values = cache.prompt_values[index][:, :, : rows.prompt_width]

            def attend(q, k, v, rk=row_keys, rv=row_values, pk=prompt_keys, pv=prompt_values):  # type: ignore[no-untyped-def]
                rk[index_n, :, rows.counts - 1] = k
                rv[index_n, :, rows.counts - 1] = v
                return attention(
                    q,
                    prompt_keys=pk,
                    prompt_values=pv,
                    keys=rk[:, :, : rows.width],
                    values=rv[:, :, : rows.width],
                )

            h = self._run_layer(layer, h, positions, attend)
        return self.unembed(h)

    def _run_layer(self, layer: _Layer, h: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """TransformerSelfAttentionLayer.forward on h [K, D] with another attention.

        ``attend`` takes q [K, heads, hd] and k, v [K, kv_heads, hd], and returns [K, heads, hd].
        """
        module, attn = layer.module, layer.module.attn
        x = module.sa_norm(h)
        q, k = layer.q(x), layer.k(x)
        v = layer.v(x).unflatten(-1, (-1, attn.head_dim))
        heads = torch.cat([q, k], dim=-1).unflatten(-1, (-1, attn.head_dim))
        if attn.pos_embeddings is not None:
            heads = attn.pos_embeddings(heads[:, None], input_pos=positions)[:, 0]
        q, k = heads.split([attn.num_heads, attn.num_kv_heads], dim=1)
        if attn.q_norm is not None:
            q, k = attn.q_norm(q), attn.k_norm(k)
        h = module.sa_scale(layer.out(attend(q, k, v).flatten(1))) + h
        x = module.mlp_norm(h)
        y = module.mlp.activation(layer.gate(x))
        if layer.up is not None:
            y = y * layer.up(x)
        return h + module.mlp_scale(layer.down(y))


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, heads, hd] of one prompt."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, S, hd]
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


class _GroupAttention:
    """Attention of one new token per row over its prompt and its own response.

    Scores over the prompt are computed for all rows of a prompt in one product, on a grid of
    [prompts, group_width] places of which some may be empty; the softmax runs over both parts.
    """

    def __init__(self, rows: RowState) -> None:
        device = rows.tokens.device
        prompts, width = len(rows.prompt_lengths), rows.group_width
        self._grid = (prompts, width)
        self._place = rows.prompts * width + rows.columns  # [n] in the flattened grid
        key = torch.arange(rows.prompt_width, device=device)
        response = torch.arange(rows.width, device=device)
        visible = torch.cat(
            [
                key < rows.prompt_lengths[rows.prompts][:, None],
                response < rows.counts[:, None],
            ],
            dim=1,
        )  # [n, P + C]
        bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
        self._bias = bias[:, None, None]
        self._prompt_width = rows.prompt_width

    def __call__(
        self, q: Tensor, *, prompt_keys: Tensor, prompt_values: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """q [n, heads, hd] -> [n, heads, hd]; keys and values as in :class:`GroupCache`."""
        n, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        q = q.unflatten(1, (kv_heads, -1)) * head_dim**-0.5  # [n, kv, r, hd]
        prompts = self._grid[0]
        grid = self._to_grid(q)  # [prompts, kv, width * r, hd]
        over_prompt = self._from_grid(grid @ prompt_keys[:prompts].mT)  # [n, kv, r, P]
        scores = torch.cat([over_prompt, q @ keys.mT], dim=-1)
        probs = (scores + self._bias).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        own = probs[..., self._prompt_width :] @ values
        shared = self._to_grid(probs[..., : self._prompt_width]) @ prompt_values[:prompts]
        return (own + self._from_grid(shared)).reshape(n, heads, head_dim)

    def _to_grid(self, x: Tensor) -> Tensor:
        """[n, kv, r, d] -> [prompts, kv, width * r, d]."""
        prompts, width = self._grid
        _, kv, r, d = x.shape
        grid = x.new_zeros(prompts * width, kv, r, d)
        grid[self._place] = x
        return grid.view(prompts, width, kv, r, d).transpose(1, 2).reshape(prompts, kv, -1, d)

    def _from_grid(self, x: Tensor) -> Tensor:
        """[prompts, kv, width * r, d] -> [n, kv, r, d]."""
        prompts, width = self._grid
        kv, d = x.shape[1], x.shape[3]
        rows = x.view(prompts, kv, width, -1, d).transpose(1, 2).flatten(0, 1)
        return rows[self._place]

