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
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from torchtune_grpo.models import NormFirstAttention
from torchtune_grpo.rollout.attention import GroupAttention, PromptAttention
from torchtune_grpo.rollout.cache import CacheShape, GroupCache
from torchtune_grpo.rollout.gather import LayerGather
from torchtune_grpo.rollout.layout import RowLayout
from torchtune_grpo.rollout.linear import KINDS, RolloutLinear
from torchtune_grpo.rollout.rotation import Rotate, Rotation


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
    rotation: Rotation
    qkv: RolloutLinear
    out: RolloutLinear
    gate_up: RolloutLinear  # the gate alone where there is no "up"
    down: RolloutLinear


class NativeDecoder:
    """Runs a model that :func:`unsupported_reason` finds nothing in.

    Args:
        model (TransformerDecoder): the policy; its weights are read, never changed, but those of
            q, k, v and of gate and up may be laid side by side; see :class:`RolloutLinear`.
        merge_adapters (bool): see :class:`RolloutLinear`.
        dtype (torch.dtype): what to compute in.
        copy (bool): see :class:`RolloutLinear`.
        move (bool): see :class:`RolloutLinear`.
        device (torch.device): where to compute.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        *,
        merge_adapters: bool,
        dtype: torch.dtype,
        copy: bool = True,
        move: bool = True,
        device: torch.device,
    ) -> None:
        def linear(*modules: Any) -> RolloutLinear:
            modules = tuple(module for module in modules if module is not None)
            return RolloutLinear(modules, merge=merge_adapters, dtype=dtype, copy=copy, move=move)

        attn = model.layers[0].attn
        self.gather: LayerGather | None = None  # of a model that stays sharded
        self.vocab = model.tok_embeddings.num_embeddings
        self.heads = attn.num_heads
        self.dtype = dtype
        self.device = device
        self._embed = model.tok_embeddings
        self._norm = model.norm
        self._output = linear(model.output)
        self._rotations: dict[int, Rotation] = {}  # layers mostly share one
        for layer in model.layers:
            module = layer.attn.pos_embeddings
            self._rotations.setdefault(
                id(module), Rotation(module, head_dim=attn.head_dim, dtype=dtype)
            )
        self._layers = [
            _Layer(
                module=layer,
                rotation=self._rotations[id(layer.attn.pos_embeddings)],
                qkv=linear(layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj),
                out=linear(layer.attn.output_proj),
                gate_up=linear(layer.mlp.w1, layer.mlp.w3),
                down=linear(layer.mlp.w2),
            )
            for layer in model.layers
        ]
        self.cache_shape = CacheShape(
            layers=len(self._layers),
            kv_heads=attn.num_kv_heads,
            head_dim=attn.head_dim,
            dtype=dtype,
            device=device,
        )

    def _gathered_layers(self) -> Iterator[tuple[int, _Layer]]:
        if self.gather is None:
            yield from enumerate(self._layers)
            return
        self.gather.begin_pass()
        for index, layer in enumerate(self._layers):
            with self.gather.layer(index):
                yield index, layer

    def linears(self) -> Iterator[RolloutLinear]:
        """All linear layers."""
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self._output

    def reserve(self, positions: int) -> None:
        """Makes ready for positions 0 to ``positions - 1``."""
        for rotation in self._rotations.values():
            rotation.reserve(positions, device=self.device)

    def step_bytes(self, tokens: int) -> int:
        """What a decoding step takes for a row of so many tokens, prompt included."""
        hidden = 3 * max(sum(layer.gate_up.sizes) for layer in self._layers)
        return 3 * 4 * self.vocab + (2 * self.heads * tokens + hidden) * self.dtype.itemsize

    def tensors(self) -> Iterator[Tensor]:
        """All that a step reads, which a recorded one has the addresses of."""
        for linear in self.linears():
            yield from linear.tensors()
        for rotation in self._rotations.values():
            yield from rotation.tensors()
        yield self._embed.weight
        for module in (self._norm, *(layer.module for layer in self._layers)):
            for name, parameter in module.named_parameters():
                if name.endswith("scale"):
                    yield parameter

    def prefill(self, prompts: list[list[int]], slots: list[int], cache: GroupCache) -> Tensor:
        """Runs prompts side by side, without padding, and caches their keys and values.

        Args:
            prompts (list[list[int]]): token ids.
            slots (list[int]): where in the cache each of them goes.
            cache (GroupCache): with room for them.

        Returns:
            Tensor: [prompts, V] logits of the token behind each prompt, float32.
        """
        attention = PromptAttention([len(prompt) for prompt in prompts], slots, cache)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        h = self._run_layers(tokens.to(self.device), attention)
        return self._unembed(h[attention.ends])

    def decode(self, tokens: Tensor, at: RowLayout, cache: GroupCache, *, width: int) -> Tensor:
        """Feeds every live row its last token.

        Args:
            tokens (Tensor): [n] these.
            at (RowLayout): where the rows are, with a bias of at least ``width``.
            cache (GroupCache): holds their prompts and earlier tokens; receives this one.
            width (int): tokens of the longest response, or more.

        Returns:
            Tensor: [n, V] logits of the next token, float32.
        """
        at.show_last()
        return self._unembed(
            self._run_layers(tokens, GroupAttention(at, cache, width=width, heads=self.heads))
        )

    def _unembed(self, h: Tensor) -> Tensor:
        return self._output.logits(_norm(self._norm, h))

    def _run_layers(self, tokens: Tensor, attention: GroupAttention | PromptAttention) -> Tensor:
        """tokens [K] -> hidden states [K, D], before the last norm."""
        h = self._embed(tokens).to(self.dtype)
        rotations = {
            id(rotation): rotation.at(attention.positions) for rotation in self._rotations.values()
        }
        for index, layer in self._gathered_layers():
            rotate = rotations[id(layer.rotation)]
            h = _run_layer(layer, h, rotate=rotate, attend=partial(attention, index))
        return h


def _run_layer(
    layer: _Layer, h: Tensor, *, rotate: Rotate, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """TransformerSelfAttentionLayer.forward on h [K, D] with another attention.

    ``attend`` takes queries, keys and values [K, heads + 2 kv heads, hd], and returns
    [K, heads * hd].
    """
    module, attn = layer.module, layer.module.attn
    y = layer.qkv(_norm(module.sa_norm, h))
    heads = (y.contiguous() if y.stride(-1) != 1 else y).unflatten(-1, (-1, attn.head_dim))
    q, k, _ = heads.split([attn.num_heads, attn.num_kv_heads, attn.num_kv_heads], dim=1)
    norm_first = type(attn) is NormFirstAttention
    if not norm_first:
        rotate(heads[:, : -attn.num_kv_heads])
    if attn.q_norm is not None:
        q.copy_(_norm(attn.q_norm, q))
        k.copy_(_norm(attn.k_norm, k))
    if norm_first:
        rotate(heads[:, : -attn.num_kv_heads])
    h = _add(module.sa_scale, layer.out, h, attend(heads))
    x = _norm(module.mlp_norm, h)
    y = layer.gate_up(x)
    if len(layer.gate_up.sizes) > 1:
        gate, up = y.split(layer.gate_up.sizes, dim=-1)
        y = module.mlp.activation(gate) * up
    else:
        y = module.mlp.activation(y)
    return _add(module.mlp_scale, layer.down, h, y)


def _norm(module: Any, x: Tensor) -> Tensor:
    """torchtune's RMSNorm widens to float32 by itself, which keeps torch from its fused kernel."""
    if type(module) is RMSNorm and module.scale.dtype == x.dtype:
        return F.rms_norm(x, module.normalized_shape, module.scale, module.eps)
    return module(x)


def _add(scale: nn.Module, linear: RolloutLinear, h: Tensor, x: Tensor) -> Tensor:
    """h + scale(linear(x)); mostly the scale does nothing."""
    return linear.add_to(h, x) if type(scale) is nn.Identity else h + scale(linear(x))
