"""The policy's layers as the rollout runs them: packed prompts or replies, and one token per row.

It reads the modules of an unmodified torchtune ``TransformerDecoder`` (embedding, norms and
activations are called as they are) and brings its own attention: a group's prompt has one copy of
keys and values, grouped-query heads are not expanded, and only the filled part of the cache is
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn
from torchtune.modules import FeedForward, TransformerDecoder, TransformerSelfAttentionLayer

from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.models.layers import HalfRotation, UniformAttention
from torchtune_grpo.rollout.attention import (
    GridAttention,
    KernelAttention,
    PromptAttention,
    ReplyAttention,
    kernel_runs,
)
from torchtune_grpo.rollout.cache import CacheShape
from torchtune_grpo.rollout.linear import KINDS, RolloutLinear
from torchtune_grpo.rollout.sampling import bytes_per_logit

Rotate = Callable[[Tensor], None]  # heads [K, H, hd], in place
Attention = GridAttention | KernelAttention | PromptAttention | ReplyAttention


def unsupported_reason(model: TransformerDecoder) -> str | None:
    """Return what the native engine does not recognise in a policy; None if it can run it."""
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
        if type(attn) is not UniformAttention or not attn.is_causal:
            return f"layer {index}'s attention is a {type(attn).__name__}"
        if type(mlp) is not FeedForward:
            return f"layer {index}'s feed-forward is a {type(mlp).__name__}"
        gates = (mlp.w1, mlp.w2) if mlp.w3 is None else (mlp.w1, mlp.w2, mlp.w3)
        for module in (attn.q_proj, attn.k_proj, attn.v_proj, attn.output_proj, *gates):
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
    window: int | None  # how many tokens one attends to, itself included; None: all


class NativeDecoder:
    """Runs a model that ``unsupported_reason`` accepts, on ``device`` in ``dtype``.

    The weights of q, k and v, and of gate and up, may move side by side, with the same values; see
    ``RolloutLinear``, also for ``merge_adapters`` and ``move``. Weights are copied, where they
    have to be, up to ``room`` bytes; the others are made anew for every product.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        *,
        merge_adapters: bool,
        dtype: torch.dtype,
        room: float = math.inf,
        move: bool = True,
        device: torch.device,
    ) -> None:
        make = partial(RolloutLinear, merge=merge_adapters, dtype=dtype, move=move)

        def linear(*modules: object) -> RolloutLinear:
            present = [module for module in modules if module is not None]
            made = make(present)
            self.copied_bytes += made.copied_bytes
            fits = not made.copied_bytes or self.copied_bytes <= room
            return made if fits else make(present, copy=False)

        self.copied_bytes = 0  # what copies of all weights that need one take
        attn = model.layers[0].attn
        self.vocab = model.tok_embeddings.num_embeddings
        self.heads = attn.num_heads
        self.dtype = dtype
        self.device = device
        self._embed = model.tok_embeddings
        self._norm = model.norm
        self._output = linear(model.output)
        self._rotations: dict[int, Rotation] = {}  # layers usually share one
        for layer in model.layers:
            module = layer.attn.pos_embeddings
            self._rotations.setdefault(id(module), Rotation(module, dtype=dtype))
        self._layers = [
            _Layer(
                module=layer,
                rotation=self._rotations[id(layer.attn.pos_embeddings)],
                qkv=linear(layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj),
                out=linear(layer.attn.output_proj),
                gate_up=linear(layer.mlp.w1, layer.mlp.w3),
                down=linear(layer.mlp.w2),
                window=getattr(layer.attn, "window", None),
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

    @cached_property
    def has_kernel(self) -> bool:
        """Whether a decoding step's attention is one kernel."""
        return kernel_runs(self.cache_shape, heads=self.heads)

    def linears(self) -> Iterator[RolloutLinear]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self._output

    def reserve(self, positions: int) -> None:
        """Prepare rotations for positions 0 to ``positions - 1``."""
        for rotation in self._rotations.values():
            rotation.reserve(positions, device=self.device)

    def step_bytes(self, tokens: int, params: SamplingParams) -> int:
        """Return the bytes of a decoding step for a row of ``tokens`` tokens, prompt included."""
        hidden = 3 * max(sum(layer.gate_up.sizes) for layer in self._layers)
        logits = bytes_per_logit(params) * self.vocab
        return logits + (2 * self.heads * tokens + hidden) * self.dtype.itemsize

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that a decoding step reads."""
        for linear in self.linears():
            yield from linear.tensors()
        for rotation in self._rotations.values():
            yield from rotation.tensors()
        yield self._embed.weight
        yield from self._norm.parameters()
        for layer in (each.module for each in self._layers):
            between = (layer.sa_norm, layer.sa_scale, layer.mlp_norm, layer.mlp_scale)
            for module in (*between, layer.attn.q_norm, layer.attn.k_norm):
                if module is not None:
                    yield from module.parameters()

    def feed(self, attention: PromptAttention | ReplyAttention) -> Tensor:
        """Run prompts or replies side by side, without padding.

        Returns [n, V], the logits of the token after each of them, in float32.
        """
        h = self._run_layers(attention.tokens, attention)
        return self._unembed(h[attention.ends])

    def decode(self, tokens: Tensor, attention: GridAttention | KernelAttention) -> Tensor:
        """Feed every live row its last token: [n] -> [n, V] logits of the next one, in float32."""
        return self._unembed(self._run_layers(tokens, attention))

    def _unembed(self, h: Tensor) -> Tensor:
        return self._output.logits(self._norm(h))

    def _run_layers(self, tokens: Tensor, attention: Attention) -> Tensor:
        """tokens [K] -> hidden states [K, D], before the last norm."""
        h = self._embed(tokens).to(self.dtype)
        rotation_of = cache(lambda rotation: rotation.at(attention.positions))
        for index, layer in enumerate(self._layers):
            rotate, attend = None, partial(attention, index, window=layer.window)
            table = layer.rotation.table
            is_whole = table is not None and table.shape[-1] == self.cache_shape.head_dim
            if is_whole and isinstance(attention, KernelAttention):  # which rotates whole heads
                attend = partial(attend, table=table)
            else:
                rotate = rotation_of(layer.rotation)
            h = _run_layer(layer, h, rotate=rotate, attend=attend)
        return h


def _run_layer(
    layer: _Layer, h: Tensor, *, rotate: Rotate | None, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run TransformerSelfAttentionLayer.forward on h [K, D] with another attention.

    ``attend`` takes queries, keys and values [K, heads + 2 kv heads, hd], and returns
    [K, heads * hd]. If ``rotate`` is None, it also rotates.
    """
    module, attn = layer.module, layer.module.attn
    y = layer.qkv(module.sa_norm(h))
    heads = (y.contiguous() if y.stride(-1) != 1 else y).unflatten(-1, (-1, attn.head_dim))
    q, k, _ = heads.split([attn.num_heads, attn.num_kv_heads, attn.num_kv_heads], dim=1)
    if attn.q_norm is not None:
        q.copy_(attn.q_norm(q))
        k.copy_(attn.k_norm(k))
    if rotate:
        rotate(heads[:, : -attn.num_kv_heads])
    h = _add(module.sa_scale, layer.out, h, attend(heads))
    x = module.mlp_norm(h)
    y = layer.gate_up(x)
    if len(layer.gate_up.sizes) > 1:
        gate, up = y.split(layer.gate_up.sizes, dim=-1)
        y = module.mlp.activation(gate) * up
    else:
        y = module.mlp.activation(y)
    return _add(module.mlp_scale, layer.down, h, y)


def _add(scale: nn.Module, linear: RolloutLinear, h: Tensor, x: Tensor) -> Tensor:
    """Return h + scale(linear(x)); usually the scale does nothing."""
    return linear.add_to(h, x) if type(scale) is nn.Identity else h + scale(linear(x))


class Rotation:
    """Rotary position embeddings from one table, in place.

    A module that is not a HalfRotation is called as it is; None rotates nothing.
    """

    def __init__(self, module: nn.Module | None, *, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self.table: Tensor | None = None  # [T, 2, 1, hd], by position

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a decoding step reads."""
        return [] if self.table is None else [self.table]

    def reserve(self, positions: int, *, device: torch.device) -> None:
        """Make the table for positions 0 to ``positions - 1``, unless it is there already."""
        if type(self._module) is not HalfRotation:
            return
        if self.table is not None and len(self.table) >= positions:
            return
        turns = self._module.turns(torch.arange(positions, device=device)[None], self._dtype)
        self.table = torch.stack(turns, dim=2)[0]

    def at(self, positions: Tensor) -> Rotate:
        """Return a function that rotates heads [K, H, hd] to ``positions`` [K], in place."""
        if self._module is None:
            return lambda heads: None
        if self.table is None:
            return partial(_turn_by, self._module, positions=positions[:, None])
        cos, sin = self.table[positions].unbind(dim=1)
        return partial(_turn_halves, cos=cos, sin=sin)


def _turn_by(module: nn.Module, heads: Tensor, *, positions: Tensor) -> None:
    heads.copy_(module(heads[:, None], input_pos=positions)[:, 0])  # positions [K, 1]


def _turn_halves(heads: Tensor, *, cos: Tensor, sin: Tensor) -> None:
    heads = heads[..., : cos.shape[-1]]  # a model may leave the rest of a head as it is
    rolled = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(rolled, sin)
