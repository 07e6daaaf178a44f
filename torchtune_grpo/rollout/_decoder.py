"""The policy's layers as the rollout runs them: packed prefill, and one token for every live row.

It reads the modules of an unmodified torchtune ``TransformerDecoder`` (embedding, norms, positional
embeddings and activations are called as they are) and brings its own attention: a group's prompt
has one copy of keys and values, grouped-query heads are not expanded, and only the filled part of
the cache is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from torchtune_grpo.models import NormFirstAttention
from torchtune_grpo.rollout._attention import GroupAttention, PromptAttention, RowState
from torchtune_grpo.rollout._cache import CacheShape, GroupCache
from torchtune_grpo.rollout._gather import LayerGather
from torchtune_grpo.rollout._linear import KINDS, JointLinear, RolloutLinear
from torchtune_grpo.rollout._rotation import rotation


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
        if type(attn) not in (MultiHeadAttention, NormFirstAttention) or not attn.is_causal:
            return f"layer {index}'s attention is a {type(attn).__name__}"
        if type(mlp) is not FeedForward:
            return f"layer {index}'s feed-forward is a {type(mlp).__name__}"
        for module in (attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj, mlp.w1, mlp.w2):
            if type(module) not in KINDS:
                return f"layer {index} has a {type(module).__name__}"
    return None


@dataclass
class _Layer:
    module: TransformerSelfAttentionLayer
    qkv: JointLinear
    out: RolloutLinear
    gate_up: JointLinear  # the gate alone where there is no "up"
    down: RolloutLinear


class NativeDecoder:
    """Runs a model that :func:`unsupported_reason` finds nothing in.

    Args:
        model (TransformerDecoder): the policy; its weights are read, never changed.
        merge_adapters (bool): see :class:`RolloutLinear`.
        dtype (torch.dtype): what to compute in.
        copy (bool): see :class:`RolloutLinear`.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        *,
        merge_adapters: bool,
        dtype: torch.dtype,
        copy: bool = True,
    ) -> None:
        def linear(module: Any) -> RolloutLinear:
            return RolloutLinear(module, merge=merge_adapters, dtype=dtype, copy=copy)

        def join(*modules: Any) -> JointLinear:
            return JointLinear([linear(module) for module in modules if module is not None])

        self.gather: LayerGather | None = None  # of a model that stays sharded
        self._embed = model.tok_embeddings
        self._norm = model.norm
        self._output = linear(model.output)
        self._dtype = dtype
        self._layers = [
            _Layer(
                module=layer,
                qkv=join(layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj),
                out=linear(layer.attn.output_proj),
                gate_up=join(layer.mlp.w1, layer.mlp.w3),
                down=linear(layer.mlp.w2),
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

    def _gathered_layers(self) -> Iterator[tuple[int, _Layer]]:
        if self.gather is None:
            yield from enumerate(self._layers)
            return
        self.gather.begin_pass()
        for index, layer in enumerate(self._layers):
            with self.gather.layer(index):
                yield index, layer

    def linears(self) -> Iterator[RolloutLinear | JointLinear]:
        """All linear layers."""
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
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
        attention = PromptAttention([len(prompt) for prompt in prompts], slots, cache)
        positions = torch.cat([torch.arange(len(p), device=p.device) for p in prompts])
        h = self._run_layers(torch.cat(prompts), positions, attention)
        last = torch.tensor([span.stop - 1 for span in attention.spans], device=h.device)
        return self.unembed(h[last])

    def decode(self, rows: RowState, cache: GroupCache) -> Tensor:
        """Feeds every live row its last token.

        Args:
            rows (RowState): n rows.
            cache (GroupCache): holds their prompts and earlier tokens; receives this one.

        Returns:
            Tensor: [n, V] logits of the next token.
        """
        attention = GroupAttention(rows, cache)
        positions = rows.prompt_lengths[rows.at.slots] + rows.at.counts - 1  # [n]
        return self.unembed(self._run_layers(rows.tokens, positions, attention))

    def _run_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """tokens [K] at positions [K] -> hidden states [K, D], before the last norm."""
        h = self._embed(tokens).to(self._dtype)
        rotations: dict[int, Callable[[Tensor], Tensor]] = {}  # layers mostly share one
        for index, layer in self._gathered_layers():
            attn = layer.module.attn
            key = id(attn.pos_embeddings)
            if key not in rotations:
                rotations[key] = rotation(
                    attn.pos_embeddings, positions, head_dim=attn.head_dim, dtype=self._dtype
                )
            h = _run_layer(layer, h, rotate=rotations[key], attend=partial(attention, index))
        return h


def _run_layer(
    layer: _Layer,
    h: Tensor,
    *,
    rotate: Callable[[Tensor], Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """TransformerSelfAttentionLayer.forward on h [K, D] with another attention.

    ``attend`` takes q [K, heads, hd] and k, v [K, kv_heads, hd], and returns [K, heads, hd].
    """
    module, attn = layer.module, layer.module.attn
    q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in layer.qkv(module.sa_norm(h)))
    norm_first = type(attn) is NormFirstAttention
    if norm_first:
        q, k = attn.q_norm(q), attn.k_norm(k)
    q, k = rotate(torch.cat([q, k], dim=1)).split([attn.num_heads, attn.num_kv_heads], dim=1)
    if attn.q_norm is not None and not norm_first:
        q, k = attn.q_norm(q), attn.k_norm(k)
    attended = attend(q, k, v)
    # h comes first: sums take its layout, row by row, which the norms read three times as fast.
    h = h + module.sa_scale(layer.out(attended.flatten(1)))
    y, *up = layer.gate_up(module.mlp_norm(h))
    y = module.mlp.activation(y)
    if up:
        y = y * up[0]
    return h + module.mlp_scale(layer.down(y))
