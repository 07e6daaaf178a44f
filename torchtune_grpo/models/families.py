"""The model types that can be built, one row each: what config.json leaves unsaid about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.modules import RMSNorm

from torchtune_grpo.models.layers import FusedNorm, HalfRotation, PairRotation

# torchtune's name of a module in a layer -> Hugging Face's
_ATTENTION = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
}
_QK_NORMS = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
_FUSED_QKV = dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj"), "self_attn.qkv_proj")
_GATED = {"mlp.w1": "mlp.gate_proj", "mlp.w2": "mlp.down_proj", "mlp.w3": "mlp.up_proj"}
_FUSED_GATED = _GATED | dict.fromkeys(("mlp.w1", "mlp.w3"), "mlp.gate_up_proj")
_UNGATED = {"mlp.w1": "mlp.up_proj", "mlp.w2": "mlp.down_proj"}
_SHARED = {"mlp.w1": "shared_mlp.input_linear", "mlp.w2": "shared_mlp.output_linear"}
_SHARED |= {"mlp.w3": "shared_mlp.input_linear"}
_NORMS_BEFORE = {"sa_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_AFTER = {"sa_scale": "post_attention_layernorm", "mlp_scale": "post_feedforward_layernorm"}
_NORMS_AROUND = _NORMS_AFTER | {
    "sa_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
}
_NORMS_OF_GLM4 = _NORMS_BEFORE | {
    "sa_scale": "post_self_attn_layernorm",
    "mlp_scale": "post_mlp_layernorm",
}
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


class AllHeadsNorm(FusedNorm):
    """A norm over all heads at once, of x [..., heads, hd]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., heads, hd]."""
        return super().forward(x.flatten(-2)).view(x.shape)


class ShiftedLayerNorm(nn.LayerNorm):
    """A layer norm whose weights are kept less 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., D]."""
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "relu2": SquaredReLU,
}


@dataclass(frozen=True)
class Family:
    """A model type's modules: a layer has those that are named here.

    Modules with the same name on Hugging Face's side are parts of its rows there, in this order.

    ``biases`` tell of queries, keys and values, of the attention's output and of the MLP whether
    they have one: the key of config.json that says so, or True or False.
    """

    norms: Mapping[str, str]
    mlp: Mapping[str, str]
    biases: tuple[str | bool, str | bool, str | bool]
    attention: Mapping[str, str] = field(default_factory=_ATTENTION.copy)
    norm: type[nn.Module] = RMSNorm
    eps: str = "rms_norm_eps"  # key of config.json
    hidden: str = "intermediate_size"  # key of config.json
    qk_norm: type[nn.Module] | None = None  # of each head, or of all of them
    embedding: type[nn.Embedding] = nn.Embedding
    rotation: type[HalfRotation] = HalfRotation
    partial_rotation: bool = False  # whether config.json may leave a part of each head unrotated
    rotation_by_kind: bool = False  # whether layers with a window have a rotation of their own
    rotates_in_windows: bool = False  # alone, if any layers have a window

    @property
    def linear_names(self) -> dict[str, str]:
        """The linear modules, for adapters: torchtune's name -> Hugging Face's."""
        return {**self.attention, **self.mlp, "output": _TOP["output"]}

    @property
    def names(self) -> dict[str, str]:
        """All modules: torchtune's name, within a layer or the model -> Hugging Face's."""
        return {**self.linear_names, **self.norms, **(_QK_NORMS if self.qk_norm else {}), **_TOP}

    @property
    def parts(self) -> dict[str, list[str]]:
        """Hugging Face's name of a linear module -> torchtune's: several, in order, if fused."""
        found = defaultdict[str, list[str]](list)
        for ours, theirs in self.linear_names.items():
            found[theirs].append(ours)
        return dict(found)

    def has_bias(self, hf: object, name: str) -> bool:
        """Tell whether the linear layer that torchtune calls ``name`` has a bias."""
        if name == "output":
            return False
        of_qkv, of_output, of_mlp = self.biases
        said = of_mlp if name.startswith("w") else of_output if name == "output_proj" else of_qkv
        return bool(getattr(hf, said)) if isinstance(said, str) else said


_FROM_CONFIG = ("attention_bias", "attention_bias", "mlp_bias")
_ATTENTION_ONLY = ("attention_bias", "attention_bias", False)
_LLAMA = Family(_NORMS_BEFORE, _GATED, _FROM_CONFIG)
_MISTRAL = replace(_LLAMA, biases=(False, False, False))  # ignores attention_bias
_GEMMA = replace(_LLAMA, biases=_ATTENTION_ONLY, norm=GemmaRMSNorm, embedding=GemmaNormEmbeddings)
_GLM = Family(
    _NORMS_BEFORE,
    _FUSED_GATED,
    ("attention_bias", False, False),
    rotation=PairRotation,
    partial_rotation=True,
)
_OLMO = Family(_NORMS_AFTER, _GATED, _ATTENTION_ONLY, qk_norm=AllHeadsNorm)
_LAYER_NORMS = replace(_LLAMA, norm=nn.LayerNorm, eps="layer_norm_eps")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": _MISTRAL,
    "qwen2": replace(_LLAMA, biases=(True, False, False)),
    "qwen3": replace(_LLAMA, biases=_ATTENTION_ONLY, qk_norm=RMSNorm),
    "gemma": _GEMMA,
    "gemma3_text": replace(
        _GEMMA, norms=_NORMS_AROUND, qk_norm=GemmaRMSNorm, rotation_by_kind=True
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=_NORMS_OF_GLM4),
    "smollm3": _LLAMA,
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, rotation_by_kind=True),
    "granite": _LLAMA,
    "granitemoehybrid": replace(
        _LLAMA, mlp=_SHARED, biases=_ATTENTION_ONLY, hidden="shared_intermediate_size"
    ),
    "seed_oss": replace(_LLAMA, biases=("attention_bias", "attention_out_bias", "mlp_bias")),
    "phi3": replace(
        _MISTRAL, mlp=_FUSED_GATED, attention=_ATTENTION | _FUSED_QKV, partial_rotation=True
    ),
    "arcee": replace(_LLAMA, mlp=_UNGATED),
    "nemotron": replace(
        _LLAMA, mlp=_UNGATED, norm=ShiftedLayerNorm, eps="norm_eps", partial_rotation=True
    ),
    "starcoder2": replace(
        _LAYER_NORMS,
        mlp={"mlp.w1": "mlp.c_fc", "mlp.w2": "mlp.c_proj"},
        biases=("use_bias", "use_bias", "use_bias"),
        eps="norm_epsilon",
    ),
    "cwm": replace(_LLAMA, biases=(False, False, "mlp_bias")),
    "ernie4_5": replace(_LLAMA, biases=("use_bias", "use_bias", "use_bias"), rotation=PairRotation),
    "exaone4": replace(_MISTRAL, norms=_NORMS_AFTER, qk_norm=RMSNorm, rotates_in_windows=True),
    "helium": replace(_LLAMA, biases=("attention_bias", False, "mlp_bias"), rotation=PairRotation),
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "jais2": replace(_LAYER_NORMS, mlp=_UNGATED),
    "stablelm": replace(_LAYER_NORMS, biases=("use_qkv_bias", False, False), partial_rotation=True),
}
