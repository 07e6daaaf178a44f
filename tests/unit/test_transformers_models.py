"""Models that transformers' modules compute: log-probs, gradients, samples, adapters, files."""

import json
import math
from dataclasses import replace

import hf_models
import pytest
import rollouts
import torch
from checkpoints import saving_config
from hf_models import BY_TRANSFORMERS, MODELS, SHAPE, VOCAB, hf_folder
from peft import PeftModel
from policies import build_policy, response_rows
from rollouts import STOPS, Scripted, assert_same_samples, plain, text_of, with_turns
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from torchtune_grpo.checkpoint.checkpoints import Checkpoints
from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.models import hf_model, lora_hf_model, transformers_model
from torchtune_grpo.models.auto import TransformersModel
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.rollout.transformers import TransformersEngine
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import micro_batches

TOKENS = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(3))
PROMPTS = [[5, 6, 7, 8, 9] * 4, [5, 6, 7], [1, 12]]  # of which a window sees a part
ENDS = dict(eos_token_id=[*range(100, 200)])  # of config.json, which end no response here


def load(folder, build=hf_model, **arguments):
    """A model with the folder's weights, and adapters that are not 0, as a trainer has it."""
    torch.manual_seed(0)
    model = hf_models.load(folder, build, **arguments)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            elif "magnitude" in name:
                parameter.mul_(1 + torch.rand(parameter.shape, generator=generator))
    if adapters := get_adapter_params(model):
        set_trainable_params(model, adapters)
    model.kind.check_loaded()
    return model


def engine_of(model, **settings):
    return make_engine(EngineContext(model, RolloutConfig(**settings), torch.device("cpu")))


def request(*, row_limit=None, **options):
    given = {"group_size": 3, "stops": (), **options}
    return replace(rollouts.request(PROMPTS, **given), row_limit=row_limit)


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_logits_log_probs_and_gradients_are_transformers_own(tmp_path, name):
    """In rows of several lengths, padded, where no pass holds all logits."""
    folder = hf_folder(name, tmp_path)
    model, theirs = load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, TransformersModel)
    expected = theirs(TOKENS, use_cache=False).logits
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-5)
    trajectory = make_groups([5, 9], [4, 7, 6, 2])
    (part,) = micro_batches(trajectory, group_size=2, pack=False, rows=4)
    found = response_logprobs(
        model, part.layout, temperature=0.7, entropy="value", chunk_bytes=4 * VOCAB * 5
    )
    alone = response_rows(lambda row: theirs(row, use_cache=False).logits, trajectory, 0.7)
    torch.testing.assert_close(torch.stack(found).double(), alone, atol=1e-4, rtol=1e-4)
    ours, own = dict(model.hf.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == own.keys()
    gradients = [
        torch.autograd.grad(values.sum(), list(of.values()), allow_unused=True)
        for values, of in ((found[0], ours), (alone[0], own))
    ]
    for key, one, other in zip(ours, *gradients, strict=True):
        assert (one is None) == (other is None), key
        if one is not None:
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
@torch.no_grad()
def test_samples_in_a_mixed_batch_are_those_of_each_row_alone(tmp_path, name):
    """With turns, filters, stops and penalties; greedy tokens are those of ``generate``."""
    folder = hf_folder(name, tmp_path, **ENDS)
    model = load(folder)
    engine = engine_of(model, max_rows=7)
    many = (*STOPS, *range(60, 90))
    for asked in (
        request(temperature=0.8, stops=many, row_limit=20),
        request(top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, min_new_tokens=3),
        request(stops=STOPS, stop_strings=("b", "ca"), decode=text_of, temperature=1.3),
    ):
        turns, again = Scripted(), Scripted()
        samples = engine.generate(with_turns(asked, turns))
        expected, questions = plain(model, with_turns(asked, again))
        assert_same_samples(samples, expected)
        assert torch.equal(samples.sampled, expected.sampled)
        assert sorted(turns.asked) == sorted(questions)
        assert bool(questions) == bool(asked.stop_tokens)
    greedy = engine.generate(request(temperature=0.0, group_size=1, max_generated_tokens=40))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    for prompt, row in zip(PROMPTS, greedy.responses, strict=True):
        said = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
        assert torch.equal(said[0, len(prompt) :], row)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
@pytest.mark.parametrize("kind", ["full", "lora", "dora"])
@torch.no_grad()
def test_what_is_saved_says_the_same_in_transformers_and_peft(tmp_path, name, kind):
    base = hf_folder(name, tmp_path / "base")
    build = hf_model if kind == "full" else lora_hf_model
    adapters = {} if kind == "full" else dict(lora_rank=4, lora_alpha=8, use_dora=kind == "dora")
    model = load(base, build, **adapters)
    node = {"_component_": "torchtune_grpo.models.HFCheckpointer", "checkpoint_dir": str(base)}
    checkpoints = Checkpoints(saving_config(node, tmp_path / "out"))
    if kind == "full":
        for parameter in model.parameters():
            parameter.mul_(1.1)
    expected, before = model(TOKENS), {k: v.clone() for k, v in model.state_dict().items()}
    folder = checkpoints.save(model, {}, step=1)
    for key, value in model.state_dict().items():
        assert value.equal(before[key]), f"saving changed {key}"
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(merged(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    files = [json.loads((each / "config.json").read_text()) for each in (base, folder)]
    assert files[0] == files[1]
    unadapted = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (unadapted(TOKENS).logits - expected).abs().max() > 0.1
    if kind != "full":
        adapted = PeftModel.from_pretrained(unadapted, folder / "adapter")
        torch.testing.assert_close(adapted(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    restored = load(base, build, **adapters)
    checkpoints.restore(restored, folder)
    assert torch.equal(restored(TOKENS), expected)


@torch.no_grad()
def test_only_an_adapter_drops_out_in_training(tmp_path):
    folder = hf_folder("gpt_oss", tmp_path, attention_dropout=0.5)
    model = load(folder)
    assert torch.equal(model.train()(TOKENS), model.eval()(TOKENS))
    model = load(folder, transformers_model, lora_rank=4, lora_dropout=0.5)
    assert (model.train()(TOKENS) - model.eval()(TOKENS)).abs().max() > 1e-2


def test_rows_that_reach_the_limit_are_reported_as_finished(tmp_path):
    engine, seen = engine_of(load(hf_folder("lfm2", tmp_path)), max_rows=5), []
    engine.generate(replace(request(max_generated_tokens=2), report=seen.append))
    assert [now.finished for now in seen] == [5, 9] and seen[-1].rows == 9


def test_other_engines_are_refused_by_the_modules_that_they_sample(tmp_path):
    model = load(hf_folder("lfm2", tmp_path))
    for name in ("native", "transformers"):
        assert isinstance(engine_of(model, engine=name), TransformersEngine)
    for settings in ("vllm", {"cuda_graphs": "never"}):
        with pytest.raises(ValueError, match=r"^rollout.engine=\w+: .* leave the choice of the "):
            engine_of(model, engine=settings)
    with pytest.raises(ValueError, match="^rollout.engine=transformers: .* leave the choice"):
        engine_of(build_policy(), engine="transformers")


def test_a_step_whose_samples_are_of_another_model_is_refused(tmp_path):
    """A cache or padding with which ``generate`` computes something else is not trained on."""
    model = load(hf_folder("lfm2", tmp_path))
    engine, name = engine_of(model), "sampling/sampling_logp_difference"
    engine.check_step({f"{name}/max": 1e-3, f"{name}/mean": 1.0})
    with pytest.raises(ValueError, match="model: lfm2, .* cannot be trained: .* by 0.02 .max."):
        engine.check_step({f"{name}/max": 0.02, f"{name}/mean": 0.0})
    model.to(torch.bfloat16)
    engine_of(model).check_step({f"{name}/max": 2.0, f"{name}/mean": 0.05})
    with pytest.raises(ValueError, match="differ by nan .mean."):
        engine_of(model).check_step({f"{name}/max": 0.0, f"{name}/mean": math.nan})


@torch.no_grad()
def test_a_type_of_the_table_is_the_same_by_transformers(tmp_path):
    folder = hf_folder("qwen3", tmp_path, tie_word_embeddings=True)
    model = load(folder, transformers_model)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-5)


_SIGHT = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
SEEING = {
    "gemma4": _SIGHT | dict(num_key_value_heads=2, head_dim=16),
    "mistral3": _SIGHT | dict(image_size=28, patch_size=14),  # whose whole alone is tied
}


@pytest.mark.parametrize("name", SEEING)
@torch.no_grad()
def test_the_text_part_of_a_model_that_also_sees_is_taken_and_saved(tmp_path, name):
    kind, shape = (MODELS | BY_TRANSFORMERS)[name.replace("3", "")]
    text = {**SHAPE, **shape, "model_type": kind, "head_dim": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(name, text_config=text, vision_config=SEEING[name])
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path / "base")
    expected = whole(TOKENS, use_cache=False).logits
    model = load(tmp_path / "base")
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-5)
    model.kind.write(None, {}, model.state_dict(), tmp_path / "end")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "end", dtype=torch.float32)
    torch.testing.assert_close(saved(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


def test_what_is_no_causal_decoder_is_refused_by_one_line(tmp_path, monkeypatch):
    bidirectional = hf_folder("gemma4", tmp_path / "all", use_bidirectional_attention="all")
    with pytest.raises(
        ValueError, match="model: gemma4_text, .* a token changes the logits of those before it"
    ):
        load(bidirectional)
    folder = hf_folder("qwen3_moe", tmp_path / "moe")
    with pytest.raises(ValueError, match="lora_attn_modules, .*remove them"):
        lora_hf_model(str(folder), lora_attn_modules=["q_proj"])
    with pytest.raises(ValueError, match="lora_modules=.'w1'.*k_proj, o_proj, q_proj, v_proj"):
        transformers_model(str(folder), lora_rank=4, lora_modules=["w1"])
    with pytest.raises(ValueError, match="q_proj, v_proj. Experts, .* can have no adapters"):
        transformers_model(str(folder), lora_rank=4, lora_modules=["q_proj", "gate_up_proj"])
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    for change, why in (
        ({"model_type": "no_such"}, "cannot build a causal model from its config.json"),
        ({"quantization_config": {"quant_method": "awq"}}, "the weights are quantized"),
    ):
        file.write_text(json.dumps(settings | change))
        with pytest.raises(ValueError, match=why):
            hf_model(str(folder))
    monkeypatch.setattr("torchtune_grpo.models.tokenizer.version", lambda package: "4.57.0")
    with pytest.raises(ValueError, match="from version 5 on; `pip install"):
        hf_model(str(folder))
