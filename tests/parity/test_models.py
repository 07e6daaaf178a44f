"""Models from a folder compute what transformers computes: logits, tokens, adapters, exports."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import TINY, llama_checkpoint, qwen_checkpoint, saving_config
from decode_attention import decode_attention  # noqa: F401
from hf_models import MODELS, VOCAB, hf_folder, load
from peft import PeftModel
from policies import LORA, response_rows, start_magnitudes
from rollouts import request
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.qwen2 import lora_qwen2
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from torchtune_grpo.checkpoint.checkpoints import Checkpoints
from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.models import HFCheckpointer, hf_model, lora_hf_model
from torchtune_grpo.models.build import (
    UnsupportedModelError,
    _rotation,
    context_length,
    read_config,
)
from torchtune_grpo.models.layers import attend_in_segments, standardize
from torchtune_grpo.models.weights import hf_state
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import micro_batches

WINDOWED = ["gemma3", "mistral_window", "olmo3"]
QWEN_WINDOW = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
TOKENS = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(3))
TYPES = {kind: name for name, (kind, _) in reversed(MODELS.items())}  # the first of each


def weights_of(folder):
    return HFCheckpointer(str(folder), str(folder / "out")).load_checkpoint()["model"]


def change_weights(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(tmp_path, name):
    folder = hf_folder(name, tmp_path / name, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    ours, theirs = load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = ours(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    for each in logits:
        F.cross_entropy(each[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = hf_state({name: p.grad for name, p in ours.named_parameters()}, folder)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-4)


# Keys that some types have -> values that would be seen
KEYS: dict[str, object] = dict(
    **dict(embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.3),
    **dict(query_pre_attn_scalar=24, attention_multiplier=0.3, no_rope_layers=[1, 0]),
    **dict(hidden_activation="relu2", sliding_window_pattern=2, logit_scale=0.5),
    **dict(final_logit_softcapping=0.5, use_parallel_residual=True, num_experts=4),
    **dict(position_embedding_type="none", use_bidirectional_attention=True, qk_layernorm=True),
    **dict(use_bias=True, use_qkv_bias=True, attention_bias=True, mlp_bias=True),
)


@pytest.mark.parametrize("name", TYPES.values())
@torch.no_grad()
def test_keys_that_a_types_config_does_not_have_change_nothing(tmp_path, name):
    folder = hf_folder(name, tmp_path)
    file = folder / "config.json"
    settings, fields = json.loads(file.read_text()), type(AutoConfig.from_pretrained(folder))
    fields = fields.__dataclass_fields__
    unread = {key: value for key, value in KEYS.items() if key not in fields}
    if "layer_types" not in fields:
        other = dict(rope_type="linear", rope_theta=1e6, factor=8.0)
        unread["rope_parameters"] = settings["rope_parameters"] | {"full_attention": other}
    file.write_text(json.dumps(settings | unread))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(unread) > 7 and theirs.config.to_dict().keys() > unread.keys()
    torch.testing.assert_close(load(folder)(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_names_without_a_prefix_are_read_as_there(tmp_path):
    """A model saved without its head has none."""
    folder = hf_folder("qwen2", tmp_path)
    change_weights(folder, lambda state: {n.removeprefix("model."): w for n, w in state.items()})
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(load(folder)(TOKENS), expected, atol=1e-4, rtol=1e-4)


HUB = dict(_component_="torchtune_grpo.models.HFCheckpointer", max_shard_size="50KB")
LLAMA = dict(
    _component_="torchtune.training.FullModelHFCheckpointer",
    checkpoint_files=["model.safetensors"],
    model_type="LLAMA3_2",
)
QWEN = LLAMA | dict(model_type="QWEN2")
QWEN_SHAPE = TINY | dict(rope_base=1_000_000.0, tie_word_embeddings=True)
DORA = dict(use_dora=True)


def hub(name, shape=None, **adapters):
    """A folder of ``MODELS``, its builder and its checkpointer."""
    arguments = dict(lora_rank=4, lora_alpha=8) | adapters
    folder = partial(hf_folder, name, **shape or {})
    return folder, lambda base: lora_hf_model(str(base), **arguments), HUB


# NF4 needs weights of a multiple of 16,384 numbers.
QUANTIZABLE = dict(hidden_size=128, intermediate_size=128, head_dim=64)
QUANTIZABLE |= dict(shared_intermediate_size=128, num_attention_heads=2, num_key_value_heads=2)


PLAIN = "mistral_window qwen3 gemma3 smollm3 granite phi3 nemotron cwm exaone4 gemma jais2 stablelm"
WITH_DORA = "llama3 qwen2 olmo3 arcee glm4 starcoder2 ernie4_5 helium"
SAVED = {
    **{name: hub(name) for name in PLAIN.split()},
    **{name: hub(name, **DORA) for name in WITH_DORA.split()},
    "llama_biases": hub("llama_biases", apply_lora_to_output=True),
    "mistral": hub("mistral", lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=False),
    "qwen3_untied": hub("qwen3_untied", **DORA, apply_lora_to_output=True),
    "phi3_longrope": hub("phi3_longrope", **DORA, lora_attn_modules=["k_proj"]),
    "granitemoehybrid": hub("granitemoehybrid", **DORA, lora_attn_modules=["q_proj"]),
    **{f"{kind}_qlora": hub(name, QUANTIZABLE, quantize_base=True) for kind, name in TYPES.items()},
    # torchtune's builders and checkpointers, and each of them with ours
    "torchtune_lora": (llama_checkpoint, lambda _: lora_llama3_2(**LORA, **TINY), LLAMA),
    "torchtune_dora": (llama_checkpoint, lambda _: lora_llama3_2(**LORA, **TINY, **DORA), LLAMA),
    "torchtune_full": (llama_checkpoint, lambda _: llama3_2(**TINY), LLAMA),
    "torchtune_qwen": (qwen_checkpoint, lambda _: lora_qwen2(**LORA, **QWEN_SHAPE, **DORA), QWEN),
    "torchtune_builder": (llama_checkpoint, lambda _: lora_llama3_2(**LORA, **TINY), HUB),
    "torchtune_checkpointer": (llama_checkpoint, lambda base: lora_hf_model(str(base)), LLAMA),
}


SLOW = [pytest.param(f"{kind}_qlora", marks=pytest.mark.slow) for kind in TYPES]  # two seconds


@pytest.mark.parametrize("name", [*(name for name in SAVED if "qlora" not in name), *SLOW])
@torch.no_grad()
def test_what_is_saved_says_the_same_in_transformers_and_peft(tmp_path, name):
    """The rollout's tokens and the policy's logits, from the merged weights and the adapter."""
    make_folder, build, checkpointer = SAVED[name]
    base = make_folder(tmp_path / name)
    node = checkpointer | {"checkpoint_dir": str(base)}
    checkpoints = Checkpoints(saving_config(node, tmp_path / "out"))
    model = build(base)
    standardize(model)
    model.load_state_dict(checkpoints.base_weights(model), strict=False)
    start_magnitudes(model)
    generator = torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if "lora" in key or name == "torchtune_full":
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        elif "magnitude" in key:
            parameter.mul_(1 + torch.rand(parameter.shape, generator=generator))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folder = checkpoints.save(model, {}, step=1)
    assert folder == tmp_path / "out" / "step_000001"
    for key, value in model.state_dict().items():
        assert value.equal(before[key]), f"saving changed {key}"
    if checkpointer is HUB:
        assert len([*folder.glob("model-*-of-*.safetensors")]) > 1

    tokens = TOKENS % model.tok_embeddings.num_embeddings
    expected, restored = model(tokens), build(base)
    standardize(restored)
    restored.load_state_dict(checkpoints.base_weights(restored), strict=False)
    if adapters := get_adapter_params(restored):
        set_trainable_params(restored, adapters)
    checkpoints.restore(restored, folder)
    assert torch.equal(restored(tokens), expected)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(load(folder)(tokens), expected, atol=1e-4, rtol=1e-4)
    unadapted = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (unadapted(tokens).logits - expected).abs().max() > 0.1
    if name == "torchtune_full":
        assert not (folder / "adapter").exists()
    elif "qlora" not in name:  # whose adapter is one of the quantized base
        adapted = PeftModel.from_pretrained(unadapted, folder / "adapter")
        torch.testing.assert_close(adapted(tokens).logits, expected, atol=1e-4, rtol=1e-4)

    prompts = [tokens[0, :7].tolist(), tokens[1, :19].tolist()]
    merged.generation_config.eos_token_id = None
    options = dict(max_new_tokens=64, do_sample=False)
    said = [merged.generate(torch.tensor([p]), **options)[0, len(p) :] for p in prompts]
    for merge in ("always", "never"):
        settings = RolloutConfig(max_rows=3, engine={"merge_adapters": merge})
        engine = make_engine(EngineContext(model, settings, torch.device("cpu")))
        asked = request(prompts, stops=(), temperature=0.0, max_generated_tokens=64)
        rows = engine.generate(asked).responses
        assert torch.equal(rows, torch.stack(said).repeat_interleave(2, dim=0))


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *((name, False) for name in ("qwen2", *WINDOWED, "olmo2", "granite", "nemotron", "phi3")),
        *((name, True) for name in TYPES.values()),
    ],
)
def test_packed_rows_train_like_single_ones(tmp_path, name, quantize):
    """Values and gradients of a group that shares its prompt, against each row's full logits."""
    folder = hf_folder(name, tmp_path / name, **(QUANTIZABLE if quantize else {}))
    model = load(folder, lora_hf_model, lora_rank=4, quantize_base=quantize)
    attend_in_segments(model)
    trajectory = make_groups([5, 9], [4, 7, 6, 2])
    parts = micro_batches(trajectory, group_size=2, pack=True, rows=4)
    logprobs, _ = response_logprobs(model, parts[0].layout, temperature=0.7)
    expected, _ = response_rows(model, trajectory, 0.7)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=1e-4)
    trained = [p for name, p in model.named_parameters() if "lora" in name or not quantize]
    gradients = [torch.autograd.grad(values.sum(), trained) for values in (logprobs, expected)]
    torch.testing.assert_close(*gradients, atol=2e-3, rtol=1e-3)


GRANITE = dict(model_type="granitemoehybrid", layer_types=["full_attention"], mamba_n_heads=2)
GRANITE |= dict(position_embedding_type="rope", num_local_experts=0)
REFUSED = {
    "model_type": dict(model_type="mixtral"),
    "rope_type": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    "hidden_act": dict(hidden_act="gelu"),
    "architectures": dict(architectures=["LlamaForSequenceClassification"]),
    "quantization_config": dict(quantization_config={"quant_method": "awq"}),
    "partial_rotary_factor": dict(
        rope_parameters=dict(
            rope_type="linear", rope_theta=1e4, factor=2.0, partial_rotary_factor=0.5
        )
    ),
    "use_bidirectional_attention": dict(model_type="gemma", use_bidirectional_attention=True),
    "is_causal": dict(is_causal=False),
    "layer_types": dict(model_type="qwen3", layer_types=["chunked_attention"]),
    "per_layer_config": dict(per_layer_config={"0": {"rms_norm_eps": 0.1}}),
    "num_local_experts": GRANITE | dict(num_local_experts=2),
    "position_embedding_type": GRANITE | dict(position_embedding_type=None),
    "use_parallel_residual": dict(model_type="stablelm", use_parallel_residual=True),
    "qk_layernorm": dict(model_type="stablelm", qk_layernorm=True),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, key):
    settings = dict(model_type="llama", num_hidden_layers=1) | REFUSED[key]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match=rf"config.json says {key}=") as error:
        read_config(tmp_path)
    assert "text part" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_hidden_layers=0, layer_types=[]),
        dict(num_key_value_heads=3),
        dict(layer_types=["sliding_attention", "full_attention"]),  # of how many tokens?
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=None)),
    ],
)
def test_a_config_that_describes_no_model_is_one_line(tmp_path, changes):
    file = hf_folder("qwen3", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=r"^model_dir=.*: its config.json describes no model: .*$"):
        hf_model(str(tmp_path))


def test_a_dropout_is_taken_as_0(tmp_path, caplog):
    """As is well for a policy whose sampler has none; Seed-OSS and StarCoder2 have them."""
    folder = hf_folder("starcoder2", tmp_path, residual_dropout=0.5, embedding_dropout=0.1)
    model = load(folder)
    said = f"model_dir={folder}: config.json says"
    assert f"{said} residual_dropout=0.5, which is" in caplog.text
    assert f"{said} embedding_dropout=0.1, " in caplog.text
    assert "attention_dropout" not in caplog.text
    torch.testing.assert_close(model.train()(TOKENS), model.eval()(TOKENS), atol=0, rtol=0)


@pytest.mark.parametrize(
    "name, changes, windows",
    [
        ("mistral_window", dict(layer_types=["full_attention", "sliding_attention"]), [None, 8]),
        ("phi3", dict(layer_types=["full_attention", "sliding_attention"]), [8, 8]),
        ("gemma3", dict(), [8, None]),
        ("qwen3", dict(sliding_window=8), [None, None]),
        ("qwen3", QWEN_WINDOW, [None, 8]),
        ("llama3", dict(sliding_window=8), [None, None]),
    ],
)
@torch.no_grad()
def test_layers_have_the_windows_that_transformers_reads(tmp_path, name, changes, windows):
    """Keys that it keeps in the config, but does not read for this model, mean nothing."""
    folder = hf_folder(name, tmp_path, **changes)
    model = load(folder)
    assert model.max_seq_len == 512 and [each.attn.window for each in model.layers] == windows
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_keys_of_rotations_before_transformers_5_are_read():
    """Their configs have no ``rope_parameters``."""

    class Config(SimpleNamespace):
        def __init__(self, **keys):
            super().__init__(**keys)

    hf = Config(rope_scaling=None, rope_theta=1e4, partial_rotary_factor=0.5, head_dim=16)
    frequencies, scale = _rotation(hf, "full_attention")
    assert len(frequencies) == 4 and scale == 1.0
    hf = Config(rope_scaling={"type": "longrope"}, rope_theta=1e4)
    hf.max_position_embeddings, hf.original_max_position_embeddings = 2048, 512
    assert context_length(hf) == 512


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "name, value, match",
    [
        (NORM, None, "model.norm.weight is missing"),
        ("model.new.weight", torch.ones(2), "new.weight is unexpected"),
        (NORM, torch.ones(2), r"model.norm.weight is \[2\], not \[48\]"),
        # with which transformers computes, whatever tie_word_embeddings says
        (HEAD, torch.ones(VOCAB, 48), "tie_word_embeddings=true, but lm_head.weight differs"),
    ],
)
def test_weights_that_are_not_the_models_are_named(tmp_path, name, value, match):
    folder = hf_folder("qwen3", tmp_path)
    given = {} if value is None else {name: value}
    change_weights(folder, lambda state: {n: w for n, w in state.items() if n != name} | given)
    with pytest.raises(ValueError, match=match):
        weights_of(folder)


def test_a_spare_head_that_is_the_embedding_is_ignored(tmp_path):
    folder = hf_folder("qwen3", tmp_path)
    expected = weights_of(folder)
    change_weights(folder, lambda state: state | {HEAD: state[EMBEDDING].clone()})
    torch.testing.assert_close(weights_of(folder), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "file, content, match",
    [
        ("config.json", "{", "^model_dir=.*: config.json is not a JSON object"),
        ("config.json", "[]", "^model_dir=.*: config.json is not a JSON object"),
        (
            "config.json",
            '{"model_type": "llama", "hidden_size": null}',
            "^model_dir=.*: transformers rejects its config.json: .*'hidden_size'",
        ),
        ("model.safetensors", "version https://git-lfs", r"could not read model.safetensors \("),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json has no weight_map"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, match):
    folder = hf_folder("qwen3", tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=match):
        weights_of(folder)


SHAPE = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
TEXT = dict(head_dim=16, num_key_value_heads=1, vocab_size=VOCAB) | SHAPE


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma3", dict(text_config=TEXT, mm_tokens_per_image=4)),
        (
            "mistral3",
            dict(text_config=TEXT | dict(model_type="ministral3"), tie_word_embeddings=False),
        ),
        ("mistral3", dict(text_config=TEXT | dict(tie_word_embeddings=False))),  # the whole is tied
        ("idefics3", dict(text_config=TEXT | dict(model_type="llama", tie_word_embeddings=True))),
    ],
)
@torch.no_grad()
def test_the_text_part_of_a_model_that_sees(tmp_path, kind, settings, caplog):
    """As docs/models.md takes it out of the whole."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    (code,) = re.findall(
        r"```python\n(from transformers import [^\n]*TextToText.*?)```", page, re.DOTALL
    )
    vision = SHAPE | dict(image_size=28, patch_size=14)
    config = AutoConfig.for_model(
        kind,
        vision_config=vision,
        image_token_id=VOCAB + 1,
        image_token_index=VOCAB + 1,
        **settings,
    )
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    code = code.replace("/tmp/gemma-3-4b-it", str(tmp_path / "whole"))
    exec(code.replace("/tmp/gemma-3-4b-text", str(tmp_path / "text")), {})
    expected = whole(input_ids=TOKENS).logits
    torch.testing.assert_close(load(tmp_path / "text")(TOKENS), expected, atol=1e-4, rtol=1e-4)
    taken_out = hf_model(str(tmp_path / "whole"))  # by transformers, which is slower
    assert f"model_type='{kind}'; docs/models.md lists" in caplog.text
    assert "take out its text part" in caplog.text
    checkpointer = HFCheckpointer(str(tmp_path / "whole"), "")
    taken_out.load_state_dict(taken_out.kind.read(checkpointer, {}))
    torch.testing.assert_close(taken_out(TOKENS), expected, atol=1e-5, rtol=1e-5)
