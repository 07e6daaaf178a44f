"""Runs of models that transformers' modules compute, and of newer types, by the real commands."""

import json
import signal
from pathlib import Path
from statistics import fmean

import pytest
from hf_models import hf_folder
from hf_tokenizers import write_tokenizer
from runs import (
    NO_EVALUATION,
    SGD,
    adapter,
    completions,
    distance,
    run_ranks,
    run_tiny,
    steps_of,
    tiny_overrides,
    weights,
)
from runs import run as command
from transformers import AutoTokenizer

# A signal in the middle of a rollout: each of the runs below draws 12 tokens of all rows in a step.
REWARDS = """
import os, signal
from torchtune_grpo.rollout.transformers import _Turn

name, at = os.environ.get("AT_DRAW", "SIGTERM:0").split(":")
draws = 0

def draw(turn, tokens, logits, draw=_Turn.draw):
    global draws
    draws += 1
    if draws == int(at):
        os.kill(os.getpid(), getattr(signal, name))
    return draw(turn, tokens, logits)

_Turn.draw = draw

def of_letters(prompts, completions, **columns):
    return [sum(c.isalpha() and c.isascii() for c in text) / 12 for text in completions]
"""
OF_LETTERS = "rewards=[{_component_: my_rewards.of_letters}]"
SHAPES = {"gemma4": {"vocab_size_per_layer_input": 384}}


def model_folder(name: str, folder: Path, **shape) -> Path:
    """Make the folder of a run with a model that its config would not have."""
    base = folder / "model"
    eos = AutoTokenizer.from_pretrained(write_tokenizer(base, "qwen3")).eos_token_id
    hf_folder(name, base, vocab_size=384, eos_token_id=eos, **SHAPES.get(name, {}), **shape)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def run(folder: Path, config: str, *more: str, **options):
    return run_tiny(config, folder, OF_LETTERS, "log_groups=9", *NO_EVALUATION, *more, **options)


@pytest.mark.slow
def test_a_hybrid_learns_and_after_a_kill_and_sigterm_ends_to_the_bit_as_it_would(tmp_path):
    learn = ["num_steps=10", "optimizer.lr=0.008", "lr_scheduler=null", "dtype=fp32"]
    learn += ["batch_size=4", "grpo_samples=8", "loss.kl_coeff=0.01", "saving.every_n_steps=5"]
    whole, cut = (model_folder("qwen3_5", tmp_path / name) for name in ("whole", "cut"))
    done = run(whole, "hf_lora_grpo", *learn)
    assert done.err.count("transformers' own modules compute this model") == 1
    rewards = [step["reward"] for step in steps_of(whole / "out")]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.2, rewards
    gaps = [step["sampling/sampling_logp_difference/max"] for step in steps_of(whole / "out")]
    assert max(gaps) < 1e-4, gaps
    kls = [step["kl"] for step in steps_of(whole / "out")]
    assert kls[0] == 0 and kls[-1] > 0.01, kls  # against the base, without its adapter
    learn.append("resume_from_checkpoint=auto")
    killed = run(cut, "hf_lora_grpo", *learn, check=False, AT_DRAW="SIGKILL:80")  # in step 7
    assert killed.code == -signal.SIGKILL and len(steps_of(cut / "out")) == 6
    ended = run(cut, "hf_lora_grpo", *learn, check=False, AT_DRAW="SIGTERM:20")  # from 5, in step 7
    assert ended.code == 143 and "after step 6" in ended.err
    run(cut, "hf_lora_grpo", *learn)
    folders = [each / "out" / "step_000010" for each in (whole, cut)]
    for of in (weights, adapter):
        assert distance(*map(of, folders)) == 0 and of(folders[0])
    assert completions(whole / "out") == completions(cut / "out")
    said = command("-m", "torchtune_grpo", "sample", whole / "out", "--prompt", "a", cwd=whole)
    assert "Weights: " in said.out and "step_000010" in said.out, said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "qwen3_moe", "granitemoehybrid", "exaone4"])
def test_a_sharded_model_trains_on_two_ranks_as_on_one(tmp_path, name):
    """With layers that are computed twice; embeddings and output are one matrix, and two.

    The last two are of the table: with scales by hooks, and with layers that rotate nothing.
    """
    ends = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        config = "hf_full_grpo"
        overrides = tiny_overrides(config, model_folder(name, folder))
        overrides += [OF_LETTERS, *SGD, *NO_EVALUATION, "num_steps=3", f"batch_size={2 // ranks}"]
        overrides += ["optimizer.lr=0.1", "enable_activation_checkpointing=true"]
        run_ranks("--config", config, *overrides, ranks=ranks, cwd=folder)
        ends.append(weights(folder / "out" / "step_000003"))
    moved = distance(ends[0], weights(tmp_path / "1" / "model"))
    assert distance(*ends) < min(1e-4, moved / 100) and moved > 1e-3


@pytest.mark.slow
def test_qlora_trains_an_adapter_beside_four_bits(tmp_path):
    folder = model_folder("lfm2", tmp_path, hidden_size=128, num_attention_heads=4)
    run(folder, "hf_qlora_grpo", "dtype=fp32", "model.lora_rank=4", "optimizer.lr=0.01")
    gaps = [step["sampling/sampling_logp_difference/max"] for step in steps_of(folder / "out")]
    assert max(gaps) < 1e-4, gaps
    end = folder / "out" / "step_000002"
    assert json.loads((end / "model_card.json").read_text())["is_quantized"]
    saved = adapter(end)
    assert saved and all(value.any() for value in saved.values())
