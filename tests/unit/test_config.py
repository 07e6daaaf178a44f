"""A bad config fails before anything is loaded, naming key, value and remedy."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import torchtune_grpo.config
from torchtune_grpo.config import read_config
from torchtune_grpo.read_config import check_checkpoint_files, check_context

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"


def load(**changes):
    cfg = OmegaConf.load(CONFIGS / "llama3_2_1B_lora_grpo.yaml")
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    return cfg


def test_defaults_and_numbers_are_read():
    cfg = load(clip_grad_norm=1, temperature="7e-1")
    del cfg["ppo_epochs"]
    settings = read_config(cfg)
    assert (settings.ppo_epochs, settings.clip_grad_norm, settings.temperature) == (1, 1.0, 0.7)
    assert settings.tokenizer.path == "/tmp/Llama-3.2-1B-Instruct/original/tokenizer.model"


LORA_1B = "torchtune.models.llama3_2.lora_llama3_2_1b"
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
    ({"temperature": "nan"}, "temperature=nan", "finite"),
    ({"top_p": 1.5}, "top_p=1.5", "(0, 1]"),
    ({"dtype": "fp16"}, "dtype=fp16", "bf16 or fp32"),
    ({"forward_batch_size": 5}, "forward_batch_size=5", "divisor of 32"),
    ({"eval_dataset": None}, "eval_every_n_steps=100", "eval_dataset"),
    ({"output_dir": "/tmp/Llama-3.2-1B-Instruct"}, "output_dir=", "another folder"),
    ({"optimizer___component_": "torch.optim.AdamX"}, "optimizer._component_=", "AdamX"),
    ({"loss": {"kl_coeff": 0.1}}, "loss", "_component_"),
    ({"model": {"_component_": LORA_1B}}, "model.lora_attn_modules: missing", LORA_1B),
    ({"rollout__cuda_graphs": True, "device": "cpu"}, "rollout.cuda_graphs=True", "device=cpu"),
    ({"packed_attention": "flex", "device": "cpu"}, "packed_attention=flex", "device=cpu"),
    ({"packed_attention": "segments", "compile": True}, "packed_attention=segments", "to auto"),
    ({"rollout": {"cuda_graphs": True, "gather": "layer"}}, "cuda_graphs=True", "gather to once"),
    ({"model": "lora"}, "model='lora'", "a mapping with _component_"),
]


@pytest.mark.parametrize(("changes", "named", "remedy"), BAD, ids=[next(iter(b[0])) for b in BAD])
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


def test_prompts_must_fit_the_context():
    """Llama 3.2's context is 131,072 tokens, read off the builder without making the weights."""
    settings = read_config(load())
    check_context(settings, prompt_lengths={"dataset": 131_072 - 512})
    with pytest.raises(ValueError, match=r"eval_dataset.*context of 131072.*at most 130560"):
        check_context(settings, prompt_lengths={"dataset": 1, "eval_dataset": 131_072 - 511})


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path):
    read_config(OmegaConf.load(path))


def test_readme_table_is_the_one_in_the_code():
    readme = (CONFIGS.parents[1] / "README.md").read_text()
    assert torchtune_grpo.config.markdown_table() in readme
