"""Every causal type of transformers: trained exactly, or refused in one line.

Each is made as a small random model, whose folder is read as a run reads it. Samples in a batch of
mixed lengths are compared with each row's own log-probs.
"""

import copy
import re
from collections.abc import Mapping
from inspect import signature
from tempfile import TemporaryDirectory

import pytest
import torch
from hf_models import BY_TRANSFORMERS, MODELS, SHAPE, load
from rollouts import sample
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.models.kinds import kind_of
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext

# Values that make a model small, and the keys that get them where a config has them
SIZES = {
    300: "vocab_size vocab_size_per_layer_input",
    256: "max_position_embeddings n_positions",
    64: "hidden_size d_model n_embd word_embed_proj_dim embedding_size emb_dim dim_model lru_width "
    "mamba_d_ssm",
    96: "intermediate_size ffn_dim decoder_ffn_dim d_inner dim_ff n_inner",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_experts_per_tok moe_k linear_num_key_heads mamba_expand index_n_heads "
    "eos_token_id",
    4: "num_attention_heads n_head n_heads decoder_attention_heads num_decoder_attention_heads "
    "num_heads num_experts num_local_experts n_routed_experts moe_num_experts index_topk "
    "linear_num_value_heads mamba_n_heads",
    16: "head_dim dim_head linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state "
    "mamba_head_dim ssm_state_size state_size qk_nope_head_dim v_head_dim index_head_dim",
    8: "sliding_window attention_window_size chunk_size mamba_chunk_size mamba_num_heads "
    "qk_rope_head_dim time_step_rank rotary_dim hidden_size_per_layer_input",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "q_lora_rank kv_lora_rank",
    1: "bos_token_id decoder_start_token_id mamba_n_groups n_groups n_group topk_group "
    "first_k_dense_replace",
    0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers",
}
SMALL = {key: value for value, keys in SIZES.items() for key in keys.split()}
SMALL["is_decoder"] = True
_TWO = {key: SMALL[key] for key in SHAPE if key in SMALL}
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SPECIAL = {  # whose kinds of layers are not listed, or whose sizes depend on each other
    "bamba": _TWO | _MAMBA | dict(attn_layer_indices=[1], mamba_n_groups=1),
    "dots1": _TWO
    | _EXPERTS
    | dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1),
    "jamba": _TWO | _EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
    "lfm2_moe": _TWO | _EXPERTS | dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba2": dict(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16)
    | dict(state_size=16, n_groups=1, chunk_size=8),
    "zamba": _TWO
    | dict(layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=16)
    | dict(num_hidden_layers=5, attention_hidden_size=128, attention_head_dim=32, mamba_dt_rank=4)
    | dict(n_mamba_heads=2, num_key_value_heads=4),
    "zamba2": _TWO
    | dict(layers_block_type=["mamba", "hybrid"], num_mem_blocks=1, mamba_d_state=16, chunk_size=8)
    | dict(mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=16, attention_head_dim=32)
    | dict(attention_hidden_size=128, num_key_value_heads=4, use_mem_rope=True),
    "dbrx": dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=256, vocab_size=300)
    | dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0))
    | dict(ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2)),
    "reformer": dict(vocab_size=300, hidden_size=64, num_attention_heads=4, is_decoder=True)
    | dict(attn_layers=["local"] * 2, axial_pos_embds=False, local_attn_chunk_length=8)
    | dict(attention_head_size=16, feed_forward_size=96, max_position_embeddings=256),
    "longcat_flash": _TWO
    | dict(num_layers=2, ffn_hidden_size=96, expert_ffn_hidden_size=32, n_routed_experts=4)
    | dict(zero_expert_num=2, moe_topk=2, q_lora_rank=32, kv_lora_rank=32, head_dim=8)
    | dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4),
    "cohere_compass_text": _TWO
    | dict(layer_types=["sliding_attention", "full_attention"], head_dim=16, sliding_window=8)
    | dict(
        rope_parameters=dict.fromkeys(
            ("sliding_attention", "full_attention"), dict(rope_type="default", rope_theta=1e4)
        )
    ),
    "gpt_neo": dict(vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, window_size=8)
    | dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=256),
    "recurrent_gemma": _TWO | dict(num_hidden_layers=3, lru_width=64, attention_window_size=8),
}
_SEES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=14)
FURTHER = {  # what others need, too
    "gemma3": dict(vision_config=_SEES | dict(image_size=28), mm_tokens_per_image=4),
    "git": dict(vision_config=_SEES | dict(image_size=28)),
    "got_ocr2": dict(vision_config=_SEES | dict(image_size=56, global_attn_indexes=[0])),
    "qwen4_exp_text": dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16)
    | dict(indexer_budget=8, indexer_compress_ratio=4),
    "zaya": dict(num_experts_per_tok=1),
}
KNOWN = SPECIAL | {kind: SHAPE | settings for kind, settings in (MODELS | BY_TRANSFORMERS).values()}
LARGEST = 60e6  # parameters
# What an outcome holds that is not "transformers"
_OTHERWISE_SAMPLED = (
    "axk2 bart bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
    "deepseek_v32 deepseek_v4 dots3_note_text git glm_moe_dsa hy_v4 marian mbart moshi mvp "
    "pegasus plbart recurrent_gemma reformer roberta roberta-prelayernorm roformer rwkv trocr "
    "whisper xlm-roberta xlm-roberta-xl"
)
_NOT_MADE = {  # and why
    **dict.fromkeys(("blt", "moss_transcribe_diarize", "phi4_multimodal"), "too large"),  # in parts
    **dict.fromkeys(("musicgen", "musicgen_melody"), "no attribute 'dropout'"),  # of sounds
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "cache|per_layer_input"),
    "dots3_note": "vision adapter output width",
    "gemma3n": "requires the timm library",
}
EXPECTED = {
    **dict.fromkeys({kind for kind, _ in MODELS.values()}, "torchtune"),
    **dict.fromkeys(_OTHERWISE_SAMPLED.split(), "cannot be trained: the log-probs of its samples"),
    **{kind: f"not made: .*({why})" for kind, why in _NOT_MADE.items()},
    **dict.fromkeys(("cpmant", "prophetnet", "xlm", "xlnet", "xlstm", "xmod"), "refused: model: "),
    **dict.fromkeys(("emu3", "mllama"), "refused: model_dir=: transformers cannot build a causal"),
}


def small_config(kind):
    """Make a type's config with the sizes above, and each kind of its layers."""
    known = CONFIG_MAPPING[kind]
    if kind in KNOWN:
        return known(**KNOWN[kind])
    default = known().to_dict()
    given = sizes(known, default)
    if isinstance(text := default.get("text_config"), Mapping):
        of = text["model_type"]
        text = {"model_type": of} | sizes(CONFIG_MAPPING[of], text) | FURTHER.get(of, {})
        given["text_config"] = text
    return known(**given | FURTHER.get(kind, {}))


def sizes(known, default):
    """Return what makes a config small, whose class and default values are given."""
    keys = {*default, *signature(known).parameters}
    given = {key: SMALL[key] for key in SMALL if key in keys}
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = 4
        given.pop("head_dim", None)
    if isinstance(kinds := default.get("layer_types"), list):
        once = list(dict.fromkeys(kinds))
        given["layer_types"] = once * (2 if len(once) == 1 else 1)
        depth = dict.fromkeys(("num_hidden_layers", "num_layers"), len(given["layer_types"]))
        given |= {key: depth[key] for key in depth if key in given}
    return given


@torch.no_grad()
def outcome(kind):
    """Return how a type is trained, or in which way and words it is refused."""
    with TemporaryDirectory() as folder:
        try:
            config = small_config(kind)
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(copy.deepcopy(config))
            if sum(parameter.numel() for parameter in empty.parameters()) > LARGEST:
                return "not made: too large"
            torch.manual_seed(0)
            theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in theirs.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape)
                    parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            theirs.save_pretrained(folder)
        except Exception as error:
            return f"not made: {' '.join(str(error).split())}"
        try:
            return trained(folder)
        except ValueError as error:
            assert "\n" not in str(error), error
            return f"refused: {error}".replace(folder, "")


def trained(folder):
    model = load(folder)
    kind = kind_of(model)
    kind.check_loaded()
    engine = make_engine(EngineContext(model, RolloutConfig(), torch.device("cpu")))
    prompts = [[*range(5, 16)], [5, 6], [7, 1, 9]]
    samples, gap = sample(engine, prompts, stops=(), max_generated_tokens=8), 0.0
    for number, response in enumerate(samples.responses):
        row = torch.tensor([[*prompts[number // 2], *response.tolist()]])
        own = model(row)[0, -9:-1].log_softmax(dim=-1).gather(1, response[:, None])[:, 0]
        gap = max(gap, (own - samples.sampler_logprobs[number]).abs().max().item())
    engine.check_step({"sampling/sampling_logp_difference/max": gap})
    return kind.modules if gap < 1e-3 else f"differs by {gap}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_type_is_trained_or_refused_in_one_line(kind):
    found, expected = outcome(kind), EXPECTED.get(kind)
    assert re.search(expected or "^transformers$", found), found
