"""A bad config fails before anything is loaded, naming key, value and remedy."""

import dataclasses
import logging
import re
from pathlib import Path

import pytest
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from omegaconf import OmegaConf
from runs import tiny_overrides

from torchtune_grpo.cli.config import check_config
from torchtune_grpo.config.check import (
    check_checkpoint_files,
    check_lengths,
    read_config,
    without_effect,
)
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.config.schema import markdown_tables

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"


def load(**changes):
    cfg = OmegaConf.load(CONFIGS / "llama3_2_1B_lora_grpo.yaml")
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    return cfg


def test_defaults_and_numbers_are_read():
    cfg = load(clip_grad_norm=1, temperature="7e-1", sampling={"top_k": 5, "stop_strings": ["a"]})
    del cfg["ppo_epochs"]
    settings = read_config(cfg)
    assert (settings.ppo_epochs, settings.clip_grad_norm, settings.temperature) == (1, 1.0, 0.7)
    params = settings.sampling_params
    assert (params.max_generated_tokens, params.temperature) == (512, 0.7)
    assert (params.top_k, params.top_p, params.stop_strings) == (5, None, ("a",))
    assert settings.eval_sampling_params == params
    assert (settings.rows_per_step, settings.rows_per_forward) == (64, 8)
    assert read_config(load(forward_batch_size=None)).rows_per_forward == 64
    assert settings.rollout.max_rows is None  # as many as memory allows
    assert read_config(load(eval_dataset=None, eval_reward="x")).eval_dataset is None
    assert read_config(load(forward_batch_size=5)).rows_per_forward == 5  # a bound, no divisor
    assert settings.tokenizer.path == "/tmp/Llama-3.2-1B-Instruct/original/tokenizer.model"


LORA_1B = "torchtune.models.llama3_2.lora_llama3_2_1b"
NO_ARGUMENTS = "torchtune.models.qwen2_5.qwen2_5_0_5b"
NEGATIVE = {"_component_": "torchtune_grpo.rewards.math_correctness_reward", "weight": -0.5}
PENALTY = {"_component_": "torchtune_grpo.rewards.RepetitionPenalty"}
ADAM_8BIT = {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-6}
BAD = [
    ({"grpo_sample": 8}, "grpo_sample=8: unknown config key", "Did you mean grpo_samples?"),
    ({"kl_coeff": 0.1}, "kl_coeff=0.1: unknown config key", "Did you mean loss.kl_coeff?"),
    ({"loss__kl_coef": 0.1}, "loss.kl_coef=0.1", "Did you mean loss.kl_coeff?"),
    ({"model__lora_rnk": 4}, "model.lora_rnk=4", "Did you mean model.lora_rank?"),
    ({"grpo_samples": 1}, "grpo_samples=1", "at least 2"),
    ({"grpo_samples": 2.5}, "grpo_samples=2.5", "not of type int"),
    ({"batch_size": "four"}, "batch_size='four'", "not of type int"),
    ({"batch_size": True}, "batch_size=True", "not of type int"),
    ({"batch_size": 0}, "batch_size=0", "above 0"),
    ({"temperature": 0}, "temperature=0", "above 0"),
    ({"stop_at": 90}, "stop_at=90", "a share in [0, 1]"),
    ({"patience": 0}, "patience=0", "above 0"),
    ({"keep_best": "accuracy"}, "keep_best=accuracy", "such as eval/accuracy"),
    ({"keep_best": "eval/pass@1", "eval_samples": 0}, "keep_best=eval/pass@1", "of eval/accuracy,"),
    ({"keep_best": "eval/pass@8", "eval_samples": 6}, "eval_samples=6", "eval/pass@6, eval/maj@6,"),
    ({"keep_best": "eval/accuracy", "eval_dataset": None}, "keep_best=eval/acc", "set eval_data"),
    ({"stop_at": 0.9, "eval_dataset": None}, "stop_at=0.9: needs evaluations", "set eval_dataset"),
    ({"patience": 3, "eval_dataset": None}, "patience=3: needs evaluations", "set eval_dataset"),
    ({"temperature": "nan"}, "temperature=nan", "finite"),
    ({"top_k": 5}, "top_k=5: unknown config key", "Did you mean sampling.top_k?"),
    ({"sampling__temperature": 2}, "sampling.temperature=2: unknown", "Did you mean temperature?"),
    ({"rollout__engin": "x"}, "rollout.engin=x: unknown", "Did you mean rollout.engine?"),
    ({"sampling": {"top_p": 1.5}}, "sampling.top_p=1.5", "(0, 1]"),
    ({"sampling": {"top_k": 0}}, "sampling.top_k=0", "above 0"),
    ({"sampling": {"stop_strings": [""]}}, "sampling.stop_strings=('',)", "remove it"),
    ({"sampling": {"stop_strings": "x"}}, "sampling.stop_strings='x'", "list of str"),
    ({"sampling": {"suppressed_tokens": ["x"]}}, "sampling.suppressed_tokens=", "list of int"),
    ({"sampling": {"min_new_tokens": 600}}, "min_new_tokens=600", "512"),
    ({"sampling_correction": "token_mask"}, "='token_mask': holds", "sampling_correction.mode"),
    ({"sampling_correction": {"cap": 1}}, "sampling_correction.cap=1", "above 1"),
    ({"dtype": "fp16"}, "dtype=fp16", "bf16, fp32"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "Multiply batch_size"),
    ({"forward_token_budget": 2000}, "forward_token_budget=2000", "set one of them to null"),
    ({"output_dir": "/tmp/Llama-3.2-1B-Instruct"}, "output_dir=", "another folder"),
    ({"output_dir": "o", "adapter_dir": "o/step_2/adapter"}, "adapter_dir=o/step_2", "another out"),
    ({"output_dir": "o", "checkpointer__checkpoint_dir": "o/step_2"}, "_dir=o/step_2", "another"),
    ({"optimizer___component_": "torch.optim.AdamX"}, "optimizer._component_=", "AdamX"),
    ({"loss": {"kl_coeff": 0.1}}, "loss", "_component_"),
    ({"model": {"_component_": LORA_1B}}, "model.lora_attn_modules: missing", LORA_1B),
    ({"rollout__cuda_graphs": True}, "rollout.cuda_graphs=True", "auto, never"),
    ({"model": "lora"}, "model='lora'", "a mapping with _component_"),
    ({"model__lora_rank": 0}, "model.lora_rank=0", "above 0"),
    ({"model__lora_attn_modules": ["q_prj"]}, "model.lora_attn_modules=['q_prj']", "'q_proj'"),
    ({"model__lora_alpha": float("nan")}, "model.lora_alpha=nan", "finite"),
    ({"model": {"_component_": NO_ARGUMENTS, "rank": 1}}, "model.rank=1", "takes none"),
    ({"optimizer__lr": "fast"}, "optimizer.lr='fast'", "float"),
    ({"optimizer__lr": float("inf")}, "optimizer.lr=inf", "finite"),
    ({"optimizer": {**ADAM_8BIT, "weight_decay": "x"}}, "optimizer.weight_decay='x'", "float"),
    ({"lr_scheduler__num_warmup_steps": float("nan")}, "lr_scheduler.num_warmup_steps=nan", "fin"),
    ({"loss__kl_coeff": "abc"}, "loss.kl_coeff='abc'", "float"),
    ({"checkpointer__model_type": "LLAMA4"}, "checkpointer.model_type='LLAMA4'", "LLAMA3_2"),
    ({"dataset__num_samples": True}, "dataset.num_samples=True", "int"),
    ({"dataset__split": ""}, "dataset.split=''", "give a name"),
    ({"device": "gpu"}, "device=gpu", "cuda or cpu"),
    ({"reference__device": "meta"}, "reference.device=meta", "cuda or cpu"),
    ({"output_dir": ""}, "output_dir=", "name a folder"),
    ({"output_dir": "/dev/null/x"}, "output_dir=/dev/null/x", "another folder"),
    ({"sampling": {"suppressed_tokens": [-1]}}, "sampling.suppressed_tokens=(-1,)", "0 or more"),
    ({"rewards": [{"weight": 1e39}]}, "rewards[0].weight=1e+39", "give less"),
    ({"advantage": "max_rl", "rewards": [NEGATIVE]}, "rewards[0]: advantage=max_rl", "its range"),
    ({"advantage": "max_rl", "rewards": [PENALTY]}, "rewards[0]: advantage=max_rl", "its range"),
    ({"eval_sampling": {"temperature": 0}}, "eval_sampling.temperature=0", "above 0"),
    ({"eval_sampling": {"top_p": 0}}, "eval_sampling.top_p=0", "(0, 1]"),
    ({"clip_grad_norm": 1e39}, "clip_grad_norm=1e+39", "smaller"),
    ({"seed": -1}, "seed=-1", "from 0"),
]


@pytest.mark.parametrize(("changes", "named", "remedy"), BAD, ids=lambda x: str(x)[:40])
def test_bad_value_names_key_value_and_remedy(changes, named, remedy):
    with pytest.raises(ValueError) as error:
        read_config(load(**changes))
    assert named in str(error.value)
    assert remedy in str(error.value)


def test_missing_key_is_named():
    cfg = load()
    del cfg["num_steps"]
    with pytest.raises(ValueError, match="num_steps: missing"):
        read_config(cfg)


def test_missing_checkpoint_files_are_named(tmp_path):
    def check(**changes):
        check_checkpoint_files(read_config(load(**changes)))

    with pytest.raises(ValueError, match="checkpoint_dir=.*no such folder.*tune download"):
        check(checkpointer__checkpoint_dir=str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    here = {"checkpointer__checkpoint_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="model.safetensors is missing.*config.json"):
        check(**here)
    with pytest.raises(ValueError, match="w-02-of-02.*is missing"):
        (tmp_path / "w-01-of-02").touch()
        files = {"filename_format": "w-{}-of-{}", "max_filename": "02"}
        check(**here, checkpointer__checkpoint_files=files)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"tokenizer\.path=.*no such file"):
        check(**here, tokenizer__path=str(tmp_path / "tokenizer.model"))
    (tmp_path / "tokenizer.model").touch()
    check(**here, tokenizer__path=str(tmp_path / "tokenizer.model"))


CONFIG = "llama3_2_1B_lora_grpo"
NOT_OF_THE_MODEL = [
    ("model.num_layers=3", "model.num_layers=3.*config.json.*says 2"),
    ("model.num_heads=3", "model.num_heads=3.*cannot be made"),
    ("model.num_kv_heads=3", "model.num_kv_heads=3.*cannot be made"),
    ("checkpointer.model_type=QWEN2", "checkpointer.model_type=QWEN2.*says llama"),
    ("sampling.suppressed_tokens=[271,272]", "suppressed_tokens=.271, 272.*0 to 271"),
    ("optimizer.betas=[0.9,1.5]", r"optimizer.betas=\[0.9, 1.5\].*cannot be made"),
    ("checkpointer.checkpoint_files=[]", r"checkpointer.checkpoint_files=\[\]: names no file"),
]


@pytest.mark.parametrize(("change", "message"), NOT_OF_THE_MODEL, ids=lambda x: x[:40])
def test_what_does_not_fit_the_checkpoint_is_named(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_checkpoint_files(tiny(tmp_path, change))


def test_a_reference_that_adapters_make_needless_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torchtune_grpo.config.check"), "propagate", True)
    check_checkpoint_files(tiny(tmp_path))
    assert not caplog.messages
    check_checkpoint_files(tiny(tmp_path, "reference.dtype=fp32"))
    assert "No effect: reference" in caplog.text


def tiny(folder, *changes):
    cfg = OmegaConf.load(CONFIGS / f"{CONFIG}.yaml")
    cfg.merge_with_dotlist([*tiny_overrides(CONFIG, folder), *changes])
    return read_config(cfg)


def test_prompts_must_fit_the_context():
    """Llama 3.2's context is 131,072 tokens, read off the builder without making the weights."""
    settings = read_config(load())
    check_lengths(settings, longest_prompts={"dataset": 131_072 - 512})
    with pytest.raises(ValueError, match=r"eval_dataset.*context of 131072.*at most 130560"):
        check_lengths(settings, longest_prompts={"dataset": 1, "eval_dataset": 131_072 - 511})


def test_a_row_must_fit_the_budget():
    """A prompt of 100 and a response of 512, whose last token is not read."""
    settings = read_config(load(forward_batch_size=None, forward_token_budget=611))
    check_lengths(settings, longest_prompts={"dataset": 100})
    with pytest.raises(ValueError, match="forward_token_budget=611.*give at least 612"):
        check_lengths(settings, longest_prompts={"dataset": 101})


def test_evaluation_samples_as_training_does_where_not_told_otherwise():
    sampling = {"top_k": 5, "top_p": 0.9, "stop_strings": ["a"]}
    settings = read_config(load(sampling=sampling, eval_sampling={"temperature": 0.6, "top_p": 1}))
    params = settings.eval_sampling_params
    assert params == dataclasses.replace(settings.sampling_params, temperature=0.6, top_p=1.0)
    assert params.top_k == 5 and settings.sampling_params.top_p == 0.9


OF_THE_RATIO = {
    "importance_sampling_level": "sequence",
    "surrogate": "cispo",
    "epsilon_low": 0.1,
    "epsilon_high": 0.3,
    "dual_clip": 3.0,
}
TWO_OF_THEM = {"loss__importance_sampling_level": "sequence", "loss__surrogate": "cispo"}
WITHOUT_EFFECT = [
    ({"sampling_correction": {"cap": 3.0}}, "sampling_correction.cap=3.0.*mode=None"),
    ({"sampling_correction": {"mode": "old_logprobs", "cap": 3.0}}, "cap=3.0.*mode=old_logprobs"),
    ({"loss__kl_coeff": 0, "reference": {"dtype": "fp32"}}, "reference.*loss.kl_coeff=0"),
    ({"patience": 2, "eval_every_n_steps": None}, "patience: without eval_every_n_steps"),
    ({"stop_at": 0.0, "eval_every_n_steps": None}, "stop_at and patience: without eval_every"),
    ({"eval_samples": 0, "eval_sampling": {"top_k": 3}}, "eval_sampling: .*eval_samples=0"),
    *(
        ({f"loss__{key}": value}, rf"loss\.{key}={value}: with one optimizer .*set ppo_epochs")
        for key, value in OF_THE_RATIO.items()
    ),
    ({**TWO_OF_THEM, "sampling_correction": {"mode": "sequence_mask"}}, "level=sequence, .*cispo:"),
    (
        {**TWO_OF_THEM, "sampling_correction": {"mode": "token_mask"}},
        "effect: loss.surrogate=cispo",
    ),
]
EFFECTIVE = [
    {"forward_batch_size": 4, "pack_groups": False},
    {"forward_batch_size": None, "forward_token_budget": 4096},
    {"forward_batch_size": None},
    {"sampling_correction": {"mode": "token_mask", "cap": 3.0}},
    {"reference": {"dtype": "fp32"}},
    {"patience": 2, "stop_at": 0.9},
    {"eval_samples": 2, "eval_sampling": {"top_k": 3}},
    {"loss__importance_sampling_level": "token", "loss__dual_clip": None},
    {"loss__epsilon_high": 0.3, "ppo_epochs": 2},
    {"loss__importance_sampling_level": "sequence", "sampling_correction": {"mode": "token_mask"}},
    *(
        {f"loss__{key}": value, **steps}
        for key, value in OF_THE_RATIO.items()
        for steps in ({"num_minibatches": 2}, {"sampling_correction": {"mode": "old_logprobs"}})
    ),
    {"advantage": "max_rl", "rewards": [{**PENALTY, "weight": -1.0}, {**NEGATIVE, "weight": 0}]},
]


@pytest.mark.parametrize(("changes", "sentence"), WITHOUT_EFFECT, ids=lambda x: str(x)[:40])
def test_settings_without_effect_are_named(changes, sentence, caplog, monkeypatch):
    logger = logging.getLogger("torchtune_grpo.config.check")
    monkeypatch.setattr(logger, "propagate", True)
    read_config(load(**changes))
    assert len(caplog.messages) == 1 and re.search(sentence, caplog.messages[0])


@pytest.mark.parametrize("changes", EFFECTIVE, ids=lambda x: str(x)[:40])
def test_settings_with_effect_are_not_warned_of(changes):
    assert without_effect(read_config(load(**changes))) == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_are_valid_and_use_what_is_shipped(path):
    cfg = OmegaConf.load(path)
    if OmegaConf.is_missing(cfg, "model_dir"):
        cfg.model_dir = "/tmp/model"
    assert without_effect(read_config(cfg)) == []


def test_the_folder_of_a_model_is_asked_for_by_its_key(tmp_path):
    """One line, which names ``model_dir`` and not the nodes that have it from there."""

    def mistakes(*overrides):
        return check_config(load_config("hf_lora_grpo", ["device=cpu", *overrides]))[0]

    (problem,) = mistakes()
    assert problem.startswith("model_dir: missing from the config; give model_dir=<value>.")
    none, empty = tmp_path / "none", tmp_path / "empty"
    (problem,) = mistakes(f"model_dir={none}")
    assert problem.startswith(f"model_dir={none}: no such folder; `tune download <model> ")
    empty.mkdir()
    (problem,) = mistakes(f"model_dir={empty}")
    assert problem.startswith(f"model_dir={empty}: holds no model.safetensors")
    (empty / "model.safetensors").touch()
    (problem,) = mistakes(f"model_dir={empty}")
    assert problem.startswith(f"model_dir={empty}: holds no config.json, but model.safetensors;")
    (empty / "config.json").write_text('{"model_type": "mixtral"}')
    (problem,) = mistakes(f"model_dir={empty}")
    assert problem.startswith(f"model_dir={empty}: config.json says model_type='mixtral'; known ")
    of_node = mistakes(f"model_dir={empty}", f"checkpointer.checkpoint_dir={none}")
    assert of_node[0].startswith(f"checkpointer.checkpoint_dir={none}: no such folder; ")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    """By the tokens that prompts have; those that none has do no harm."""
    folder = write_tokenizer(hf_folder("qwen3", tmp_path / "model", vocab_size=350), "qwen3")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?"}\n')

    def mistakes(**dataset):
        node = {"_component_": "torchtune_grpo.data.RLDataset", "source": str(rows), **dataset}
        cfg = load_config("hf_lora_grpo", ["device=cpu", f"model_dir={folder}"])
        cfg |= {"dataset": node, "eval_dataset": None, "eval_every_n_steps": None}
        cfg |= {"output_dir": str(tmp_path / "out"), "max_generated_tokens": 8}
        cfg.rewards = [{"_component_": "torchtune_grpo.rewards.math_format_reward"}]
        return check_config(cfg)[0]

    assert mistakes() == []
    (problem,) = mistakes(prefill="</think>")
    assert problem.startswith("tokenizer: writes prompts of dataset with the token 350, but the ")


def test_the_table_in_the_docs_is_the_one_in_the_code():
    """At most 55 keys at the top; the README shows some of them."""
    root = CONFIGS.parents[1]
    assert markdown_tables(GRPOConfig) in (root / "docs" / "config.md").read_text()
    assert len(dataclasses.fields(GRPOConfig)) <= 55
    shown = re.findall(r"^\| `(\w+)` \|", (root / "README.md").read_text(), re.M)
    assert len(shown) == 10 and set(shown) <= {f.name for f in dataclasses.fields(GRPOConfig)}


def with_model(settings, component: str, **arguments):
    node = OmegaConf.create({"_component_": component, **arguments})
    return dataclasses.replace(settings, model=node)


def test_a_model_that_torchtune_computes_otherwise_is_refused(tmp_path):
    """transformers' Gemma 2 with the same weights gives logits that are 3 away."""
    gemma = {"embed_dim": 32, "num_layers": 1, "intermediate_dim": 64, "max_seq_len": 128}
    gemma |= {"vocab_size": 64, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    settings = with_model(tiny(tmp_path), "torchtune.models.gemma2.gemma2", **gemma)
    with pytest.raises(ValueError, match="model._component_=torchtune.models.gemma2.gemma2: "):
        check_checkpoint_files(settings)


def test_another_kind_of_model_is_refused(tmp_path):
    t5 = {"embed_dim": 8, "mlp_dim": 8, "num_heads": 1, "head_dim": 8, "num_layers": 1}
    t5 |= {"rel_pos_num_buckets": 8, "rel_pos_max_dist": 16, "vocab_size": 64, "norm_eps": 1e-6}
    component = "torchtune.models.t5._component_builders.t5_encoder"
    with pytest.raises(ValueError, match="makes a T5Encoder; only text models"):
        check_checkpoint_files(with_model(tiny(tmp_path), component, max_seq_len=64, **t5))


def test_weights_in_another_order_than_the_models_are_refused(tmp_path):
    """Llama's queries and keys: names and shapes fit, and the model would be another."""
    settings = tiny(tmp_path)
    folder = settings.checkpointer.checkpoint_dir
    halves = with_model(settings, "torchtune_grpo.models.hf_model", model_dir=folder)
    with pytest.raises(ValueError, match="set it to torchtune_grpo.models.HFCheckpointer"):
        check_checkpoint_files(halves)
    ours = {"_component_": "torchtune_grpo.models.HFCheckpointer", "checkpoint_dir": folder}
    settings = dataclasses.replace(settings, checkpointer=OmegaConf.create(ours))
    with pytest.raises(ValueError, match="set it to torchtune's checkpointer"):
        check_checkpoint_files(settings)
