"""Runs that start from what others left: SFT, GRPO of all kinds, SFT, GRPO."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, TOKENS
from hf_tokenizers import write_tokenizer
from peft import PeftModel
from runs import (
    LENGTH_REWARD,
    NO_EVALUATION,
    OF_LENGTH,
    SGD,
    metrics,
    run_tiny,
    tiny_overrides,
    tune,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from torchtune_grpo.checkpoint.checkpoints import Checkpoints
from torchtune_grpo.checkpoint.folder import find_damage
from torchtune_grpo.checkpoint.model_card import ModelCard
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.training.policy import load_policy, make_policy

LORA, FULL = "llama3_2_1B_lora_grpo", "llama3_2_1B_full_grpo"
FROM_FOLDER = "hf_full_grpo"
ADAPTERS = ["model.lora_rank=4", "model.lora_alpha=12", "model.lora_attn_modules=[q_proj,k_proj]"]
ADAPTERS.append("model.use_dora=true")  # of which torchtune's form for PEFT is wrong


def weights_of(folder):
    """Return overrides that begin from the weights in a folder."""
    file = next(folder.glob("model*.safetensors")).name
    return [f"checkpointer.checkpoint_dir={folder}", f"checkpointer.checkpoint_files=[{file}]"]


def grpo(base, folder, config, *more):
    """Take one step of ours from a folder's weights."""
    folder.mkdir(exist_ok=True)
    (folder / "my_rewards.py").write_text(LENGTH_REWARD)
    start = [f"model_dir={base}"] if config == FROM_FOLDER else weights_of(base)
    if config == LORA:
        start += ["optimizer.fused=false", *ADAPTERS]
    run_tiny(config, folder, "num_steps=1", OF_LENGTH, *SGD, *start, *more)
    return folder / "out" / "step_000001"


def sft(base, folder):
    """Take two steps of torchtune's own LoRA recipe from a folder's weights."""
    folder.mkdir()
    rows = [{"instruction": f"{n} plus 2?", "output": str(n + 2)} for n in range(8)]
    (folder / "rows.json").write_text(json.dumps(rows))
    model = TINY | {"_component_": "torchtune.models.llama3_2.lora_llama3_2"}
    overrides = [f"model.{key}={value}" for key, value in model.items()]
    overrides += [*ADAPTERS, "device=cpu", "dtype=fp32", "optimizer.fused=false", "shuffle=false"]
    overrides += ["batch_size=2", "gradient_accumulation_steps=1", "max_steps_per_epoch=2"]
    overrides += ["optimizer.lr=0.02", "lr_scheduler.num_warmup_steps=1", f"output_dir={folder}"]
    overrides += ["dataset.source=json", f"dataset.data_files={folder / 'rows.json'}"]
    overrides += [f"tokenizer.path={base / 'original/tokenizer.model'}", *weights_of(base)]
    overrides.append("seed=0")  # torchtune draws one otherwise
    overrides.append(f"tokenizer.special_tokens_path={base / 'special_tokens.json'}")
    config = ["--config", "llama3_2/1B_lora_single_device"]
    tune("run", "lora_finetune_single_device", *config, *overrides, cwd=folder)
    return folder / "epoch_0"


@torch.no_grad()
def logits(folder, adapter=None):
    """Return the logits of a folder's weights in transformers, or in PEFT."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model(TOKENS).logits


def merged(base, adapter, folder):
    """Merge an adapter into its base, as docs/checkpoints.md does."""
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    for shown, path in (("/tmp/Qwen3-0.6B", base), ("sft", adapter), ("merged", folder)):
        code = code.replace(f'"{shown}"', repr(str(path)))
    exec(code, {})
    return folder


@torch.no_grad()
def policy_logits(base):
    """Return the logits of the policy with which a run from a folder begins."""
    overrides = [*tiny_overrides(FROM_FOLDER, base.parent), f"model_dir={base}", "dtype=fp32"]
    cfg = read_config(load_config(FROM_FOLDER, overrides))
    model = make_policy(cfg, device=torch.device("cpu"))
    load_policy(model, cfg, Checkpoints(cfg).base_weights(model))
    return model.eval()(TOKENS)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.fixture
def base(tmp_path):
    """A downloaded model's folder, with files that must not be copied to checkpoints."""
    tiny_overrides(LORA, tmp_path)
    folder = tmp_path / "llama"
    write_tokenizer(folder, "smollm2")
    for place in ("original", "additional_chat_templates"):
        (folder / place).mkdir()
    shutil.copy(folder / "tokenizer.model", folder / "original")
    (folder / "original_repo_id.json").write_text('{"repo_id": "meta-llama/Tiny"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 257, "pad_token_id": 9}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|eot_id|>")
    kept = ["LICENSE.txt", "additional_chat_templates/tools.jinja"]
    for name in [*kept, ".gitattributes", "README.md", "original/params.json", "weights.gguf"]:
        (folder / name).write_text("of the base")
    return folder


FILES = {
    *("LICENSE.txt", "README.md", "SHA256SUMS", "additional_chat_templates/tools.jinja"),
    *("chat_template.jinja", "config.json", "generation_config.json", "original/tokenizer.model"),
    *(
        "model_card.json",
        "run_config.json",
        "special_tokens.json",
        "tokenizer.json",
        "tokenizer.model",
    ),
    *("tokenizer_config.json", "training_state.pt"),
}
WHOLE = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
ADAPTER = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}


def check_stands_alone(folder, *, files):
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == files
    assert find_damage(folder) is None
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: ") and "of the base" not in card
    assert re.search(r"after (1 step|\d+ steps) of GRPO\n", card) and "after 1 steps" not in card
    generation = GenerationConfig.from_pretrained(folder)  # with the turn's end
    assert {257, 260, 261} <= {*generation.eos_token_id} and generation.pad_token_id == 9
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("3 + 4").input_ids) == "3 + 4"
    modes = {oct(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    assert modes == {oct((folder / "config.json").stat().st_mode)} != {"0o100600"}


@pytest.mark.slow
def test_each_run_starts_from_what_the_one_before_has_left(tmp_path, base):
    first = grpo(base, tmp_path / "1", LORA, *NO_EVALUATION, "saving.adapter_weights_only=true")
    begun = merged(base, first / "adapter", tmp_path / "merged")
    taught = sft(base, tmp_path / "sft")
    second = grpo(taught, tmp_path / "2", LORA, *NO_EVALUATION)
    third = grpo(second, tmp_path / "3", LORA, "eval_dataset.num_samples=2")
    fourth = grpo(third, tmp_path / "4", FULL, *NO_EVALUATION)
    fifth = grpo(sft(fourth, tmp_path / "sft_again"), tmp_path / "5", LORA, *NO_EVALUATION)
    last = grpo(fifth, tmp_path / "6", FROM_FOLDER, *NO_EVALUATION)

    check_stands_alone(first, files=FILES | ADAPTER)
    for folder in (second, third, fifth):
        check_stands_alone(folder, files=FILES | WHOLE | ADAPTER)
    check_stands_alone(fourth, files=FILES | WHOLE)
    check_stands_alone(last, files=FILES | {"model.safetensors"})
    folders = (base, first, second, third, fourth, fifth, last)
    assert len({len(AutoTokenizer.from_pretrained(folder)) for folder in folders}) == 1
    alone = tmp_path / "sft/alone"  # where PEFT finds no adapter
    shutil.copytree(taught, alone, ignore=shutil.ignore_patterns("adapter*"))
    seen = [logits(base), logits(base, first / "adapter"), logits(alone)]
    seen += map(logits, (second, third, fourth, fifth, last))
    for one, other in zip(seen, seen[1:]):
        assert (one - other).abs().max() > 1e-3
    close(policy_logits(begun), seen[1])
    close(logits(alone, second / "adapter"), seen[3])
    close(logits(second, third / "adapter"), seen[4])
    bases = [
        json.loads((f / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
        for f in (first, third)
    ]
    assert bases == ["meta-llama/Tiny", str(second)]
    cards = [(f / "README.md").read_text() for f in (first, third)]
    assert "\nbase_model: meta-llama/Tiny\n" in cards[0]
    assert "base_model:" not in cards[1] and f"Base model: `{second}`" in cards[1]
    assert "accuracy" not in cards[0]
    accuracies = [r["eval/accuracy"] for r in metrics(third.parent) if "eval/accuracy" in r]
    before, after = (f"{accuracy:.3f}" for accuracy in accuracies)
    assert re.search(
        f"(Held-out|Trained-on) mean of reward_length (stayed at|.* from {before} to) {after} ",
        cards[1],
    )


def test_qloras_card_says_how_to_load_its_policy(tmp_path, monkeypatch):
    """Its adapter alone, on a base that is quantized first, is the merged policy."""
    (tmp_path / "my_rewards.py").write_text(LENGTH_REWARD)
    more = ["num_steps=1", OF_LENGTH, *SGD, "optimizer.fused=false", *NO_EVALUATION]
    run_tiny("hf_qlora_grpo", tmp_path, *more)
    monkeypatch.chdir(tmp_path / "out")
    card = Path("step_000001/README.md").read_text()
    assert "it\nis another policy: use the merged weights" in card
    base = str(tmp_path / "model")
    alone = replace(ModelCard.load(Path("step_000001")), has_weights=False)
    code = re.search(r"```python\n(.*?)```", alone.text(), re.S)[1]
    loaded: dict = {}
    exec(code, loaded)
    merged, naive = logits("step_000001"), logits(base, "step_000001/adapter")
    with torch.no_grad():
        close(loaded["model"](TOKENS).logits, merged)
    assert (naive - merged).abs().max() > 1e-2
    on_hub = alone.text("me/tiny")
    assert '"me/tiny", subfolder="adapter"' in on_hub and str(tmp_path) not in on_hub


def test_a_run_that_could_not_save_ends_before_its_first_rollout(tmp_path):
    tiny_overrides(LORA, tmp_path)
    (tmp_path / "llama/tokenizer.json").symlink_to(tmp_path / "deleted")  # as of a cleared cache
    done = run_tiny(LORA, tmp_path, check=False)
    (error,) = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert error.startswith(f"Error: output_dir={tmp_path}/out: a copy of checkpointer.checkpoint_")
    assert "llama/tokenizer.json" in error and "Free some space, check permissions" in error
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(".lock", "error.txt", "logs", "torchtune_config.yaml")
    }
