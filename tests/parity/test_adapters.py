"""A run that begins from an adapter begins as PEFT computes base and adapter."""

import json
import logging
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from checkpoints import TOKENS, peft_adapter
from hf_models import hf_folder
from policies import build_policy as random_policy
from policies import loaded_policy
from runs import tiny_overrides
from safetensors.torch import load_file, save_file
from torchtune.modules.peft import get_adapter_params
from trajectories import make_groups
from transformers import AutoModelForCausalLM

from torchtune_grpo.checkpoint.checkpoints import Checkpoints
from torchtune_grpo.checkpoint.resume import whole_on_first_rank
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.machine.parallel import reshard, shard
from torchtune_grpo.models.adapter import adapter_settings
from torchtune_grpo.models.kinds import hf_config_of
from torchtune_grpo.training.checks import check_model
from torchtune_grpo.training.logprobs import trajectory_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.reference import AdapterReference

LORA, QWEN, FULL = "llama3_2_1B_lora_grpo", "qwen2_5_1_5B_lora_grpo", "llama3_2_1B_full_grpo"
TARGETS = {
    "attention": ["q_proj", "k_proj", "o_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def base_and_config(config, folder):
    """A tiny base, and the config of a run from it."""
    overrides = [*tiny_overrides(config, folder), "dtype=fp32"]
    return folder / ("qwen" if config == QWEN else "llama"), load_config(config, overrides)


def begun(cfg):
    """The policy that a run begins with."""
    settings = read_config(cfg)
    check_model(settings)
    weights = Checkpoints(settings).base_weights()
    return loaded_policy(settings, weights).eval()


def built(cfg, folder):
    """The same, of an adapter, by a builder that is given the adapter's settings."""
    cfg.adapter_dir = str(folder)
    if "lora_rank" in cfg.model:
        wanted = adapter_settings(folder, hf_config=hf_config_of(cfg.checkpointer))
        if "apply_lora_to_output" not in cfg.model:  # torchtune's builder for a tied model
            assert wanted.pop("apply_lora_to_output") is False
        cfg.model.update(wanted)
    return begun(cfg)


ATTENTION = dict(target_modules=TARGETS["attention"])
ADAPTERS = {
    "lora": dict(r=4, lora_alpha=6, target_modules=TARGETS["all"]),
    "rslora": dict(r=8, lora_alpha=16, use_rslora=True) | ATTENTION,
    "dora": dict(r=4, lora_alpha=8, use_dora=True) | ATTENTION,
    "half an MLP": dict(r=4, lora_alpha=8, target_modules=["v_proj", "gate_proj"]),
}


@pytest.mark.parametrize("config", [LORA, QWEN, FULL])
@pytest.mark.parametrize("adapter", ADAPTERS)
@torch.no_grad()
def test_the_policy_begins_as_peft_has_it(tmp_path, config, adapter):
    base, cfg = base_and_config(config, tmp_path)
    expected = peft_adapter(base, tmp_path / "adapter", **ADAPTERS[adapter])
    policy = built(cfg, tmp_path / "adapter")
    torch.testing.assert_close(policy(TOKENS), expected, atol=2e-4, rtol=1e-4)
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (bare(TOKENS).logits - expected).abs().max() > 0.1


FROM_FOLDER = {
    "qwen2": dict(target_modules=TARGETS["all"], use_dora=True),  # with biases
    "qwen3_untied": dict(target_modules=[*TARGETS["attention"], "lm_head"]),
    "llama3": dict(target_modules="all-linear"),
}


@pytest.mark.parametrize("config", ["hf_lora_grpo", "hf_full_grpo"])
@pytest.mark.parametrize("name", FROM_FOLDER)
@torch.no_grad()
def test_a_model_from_its_folder_begins_as_peft_has_it(tmp_path, name, config):
    """Adapted, with the adapter's own settings, or merged."""
    base, adapter = hf_folder(name, tmp_path / name), tmp_path / "adapter"
    expected = peft_adapter(base, adapter, r=4, lora_alpha=8, **FROM_FOLDER[name])
    overrides = [f"model_dir={base}", f"adapter_dir={adapter}", "device=cpu", "dtype=fp32"]
    policy = begun(load_config(config, overrides))
    torch.testing.assert_close(policy(TOKENS), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, the config of a run from it, and an adapter."""
    folder = tmp_path_factory.mktemp("made")
    base, cfg = base_and_config(LORA, folder)
    peft_adapter(base, folder / "adapter", r=4, lora_alpha=8, target_modules=TARGETS["all"])
    return folder, cfg


SAYS = r"adapter_dir=\S+: adapter_config.json says {}, which is not supported; merge the adapter"
SETTINGS = {
    "rank_pattern": {"q_proj": 8},
    "modules_to_save": ["lm_head"],
    "something_new": 1,
    "peft_type": "LOHA",
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
}


@pytest.mark.parametrize("key", SETTINGS)
def test_what_is_not_computed_is_refused_by_name(made, tmp_path, key):
    shutil.copytree(made[0] / "adapter", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: SETTINGS[key]}))
    with pytest.raises(ValueError, match=SAYS.format(re.escape(f"{key}={SETTINGS[key]!r}"))):
        adapter_settings(tmp_path, hf_config={"model_type": "llama"})


# What is renamed in an adapter's weights
WEIGHTS = {
    # as PEFT saves what it adapts an output projection of
    "has base_model.model.lm_head.base_layer.weight, which is not a LoRA or DoRA": (
        "model.layers.0.mlp.up_proj.lora_A",
        "lm_head.base_layer",
    ),
    "incomplete adapter: layers.1.mlp.w2.lora_b.weight is missing or unexpected": (
        "layers.1.mlp.down_proj.lora_B",
        "layers.7.mlp.down_proj.lora_B",
    ),
    r"adapts a layers.7.mlp.w1 of \[256, 256\], and the model's is none": (
        "layers.1.mlp.gate_proj",
        "layers.7.mlp.gate_proj",
    ),
    r"adapts a layers.0.attn.k_proj of \[256, 256\], and the model's is of \[128, 256\]": (
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.k_proj",
    ),
}


@pytest.mark.parametrize("told", WEIGHTS)
def test_weights_that_the_model_has_no_place_for_are_refused(made, tmp_path, told):
    folder, cfg = made
    shutil.copytree(folder / "adapter", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_model.safetensors"
    weights = {name.replace(*WEIGHTS[told]): value for name, value in load_file(file).items()}
    save_file(weights, file)
    with pytest.raises(ValueError, match=rf"adapter_dir=\S+: .*{told}"):
        built(cfg, tmp_path)


OVERRIDES = {
    "model.lora_rank=16: adapter_dir={dir} has 4; set it to that.": "model.lora_rank=16",
    "model.lora_alpha=9: adapter_dir={dir} has 8.0; set it to that.": "model.lora_alpha=9",
    "model.lora_attn_modules=['v_proj']: adapter_dir={dir} has ['q_proj', 'k_proj', 'v_proj', "
    "'output_proj']; set it to that.": "model.lora_attn_modules=[v_proj]",
    "adapter_dir={base}/adapter: the weights in checkpointer.checkpoint_dir={base} hold this": (
        "adapter_dir={base}/adapter"
    ),
    "adapter_dir={base}: has no adapter; name a folder with": "adapter_dir={base}",
}


@pytest.mark.parametrize("told", OVERRIDES)
def test_a_model_that_does_not_fit_is_refused_by_key(made, tmp_path, told):
    folder, _ = made
    base, places = tmp_path / "base", {"dir": folder / "adapter", "base": tmp_path / "base"}
    shutil.copytree(folder / "llama", base)
    if "hold this" in told:  # as in a folder that a run has left
        shutil.copytree(folder / "adapter", base / "adapter")
        (base / "run_config.json").touch()
    more = ["lora_rank=4", "lora_alpha=8", "lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]"]
    overrides = [f"adapter_dir={folder}/adapter", *(f"model.{text}" for text in more)]
    overrides += OVERRIDES[told].format(**places).split()
    overrides.append(f"checkpointer.checkpoint_dir={base}")
    cfg = load_config(LORA, [*tiny_overrides(LORA, folder), *overrides])
    with pytest.raises(ValueError, match=re.escape(told.format(**places))):
        check_model(read_config(cfg))


def test_another_base_by_name_is_a_warning(made, tmp_path, caplog, monkeypatch):
    folder, cfg = made
    monkeypatch.setattr(logging.getLogger("torchtune_grpo.config.check"), "propagate", True)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    cfg.checkpointer.checkpoint_dir = str(tmp_path / "llama")
    (tmp_path / "llama/original_repo_id.json").write_text('{"repo_id": "meta-llama/Tiny"}')
    file = tmp_path / "adapter/adapter_config.json"
    config = json.loads(file.read_text())
    for theirs in ("meta-llama/Tiny", "meta-llama/Tiny-Instruct"):
        file.write_text(json.dumps(config | {"base_model_name_or_path": theirs}))
        built(cfg, tmp_path / "adapter")
    (said,) = [line for line in caplog.messages if "trained on" in line]
    assert "trained on meta-llama/Tiny-Instruct, but" in said and "holds meta-llama/Tiny." in said


@pytest.fixture
def alone():
    """A process group of one: a model can be sharded, and no other process is needed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", ["lora_output", "dora"])
@torch.no_grad()
def test_the_reference_is_the_policy_as_it_was_and_leaves_no_trace(kind, is_sharded, alone):
    """FSDP2 leaves an adapter of the output projection gathered behind a pass."""
    model = random_policy(kind)
    trajectory = make_groups([3, 5], [4, 9, 2, 7])
    parts = micro_batches(trajectory, group_size=2, pack=True, rows=2)
    before = trajectory_logprobs(model, parts, temperature=0.7)
    reference = AdapterReference(model, keep_start=True)
    if is_sharded:
        shard(model, device=torch.device("cpu"))
        reference.shard(device=torch.device("cpu"))
    for parameter in get_adapter_params(model).values():
        parameter.mul_(1.3)
    now = {name: value.clone() for name, value in whole_on_first_rank(model.state_dict()).items()}
    after = trajectory_logprobs(model, parts, temperature=0.7)
    assert (after - before).abs().max() > 0.1
    assert reference.logprobs(parts, temperature=0.7).equal(before)
    assert trajectory_logprobs(model, parts, temperature=0.7).equal(after)
    reshard(model)
    assert all(
        value.equal(now[name]) for name, value in whole_on_first_rank(model.state_dict()).items()
    )
