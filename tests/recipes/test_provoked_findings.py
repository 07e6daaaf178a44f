"""Each finding is provoked by a real run of the tiny random model."""

import shutil
from pathlib import Path

import pytest
import tiny_llama
from omegaconf import OmegaConf
from runs import RECIPE, run, tune

from torchtune_grpo.config.check import read_config
from torchtune_grpo.monitor.findings import BEGINS_AFTER, Watch
from torchtune_grpo.monitor.record import read

PARTS = '''
import time
from torchtune_grpo.loss import GRPOLoss

def quarter(prompts, completions, **columns):
    return [0.25] * len(completions)

def brevity(prompts, completions, completion_ids, **columns):
    return [-len(ids) / 24 for ids in completion_ids]

def right(prompts, completions, **columns):
    return [1.0] * len(completions)

def sleeps(prompts, completions, **columns):
    time.sleep(0.2)
    return [None] * len(completions)

def fails(prompts, completions, **columns):
    return [1.0, float("nan")] * (len(completions) // 2)

def odd(prompts, completions, completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]  # never, of eight equal tokens

def alternates(prompts, completions, **columns):
    return [0.0, 1.0] * (len(completions) // 2)

class RoughLoss(GRPOLoss):
    """Huge in steps 15 to 19, not a number in 22 and 24."""
    step = 0
    def __call__(self, *, advantages, **more):
        type(self).step += 1
        factor = 1e3 if 15 <= self.step < 20 else float("nan") if self.step in (22, 24) else 1.0
        return super().__call__(advantages=advantages * factor, **more)
'''
NO_EVALUATION = ["eval_dataset=null", "evaluation.every_n_steps=null"]


def rewards(*names: str) -> str:
    return f"rewards=[{','.join(f'{{_component_: provoking.{name}}}' for name in names)}]"


# Of each run: its overrides, and the findings that it provokes.
RUNS = {
    # What is paid for is to say nothing, at once.
    "collapse": (
        [rewards("quarter", "brevity"), "num_steps=22", "batch_size=4", "grpo_samples=8"]
        + ["max_generated_tokens=24", "optimizer.lr=1e-2", "loss.kl_coeff=0.001"]
        + ["evaluation.every_n_steps=3", "evaluation.samples=0", "eval_dataset.num_samples=2"],
        "kl_runaway responses_shrink reward_hacking entropy_collapsed all_wrong same_texts "
        "only_shaping_rises",
    ),
    "nothing_works": (
        [rewards("right", "sleeps", "fails"), "rewards.1.weight=0", "max_reward_failure_share=1"]
        + ["num_steps=7"]
        + ["batch_size=16", "grpo_samples=2", "max_generated_tokens=2", "sampling.min_new_tokens=2"]
        + ["objective.mask_truncated_completions=true", *NO_EVALUATION],
        "all_right nothing_trained reward_fails reward_never_applies rewards_slow",
    ),
    # Each step is far too large.
    "dead": (
        [rewards("odd"), "num_steps=6", "batch_size=16", "grpo_samples=4", "optimizer.lr=1.0"]
        + ["max_generated_tokens=8", "sampling.min_new_tokens=8", *NO_EVALUATION],
        "collapsed",
    ),
    # The config's own rewards, of a model that knows nothing.
    "short": (
        ["num_steps=4", "batch_size=4", "grpo_samples=2", "max_generated_tokens=2"]
        + ["sampling.min_new_tokens=2", *NO_EVALUATION],
        "truncated",
    ),
    "rough": (
        [rewards("alternates"), "loss._component_=provoking.RoughLoss", "optimizer.lr=1e-12"]
        + ["num_steps=102", "batch_size=1", "grpo_samples=2", "max_generated_tokens=2"]
        + NO_EVALUATION,
        "gradient_spikes steps_skipped learning_stopped",
    ),
    "dropout": (
        [rewards("alternates"), "model=torchtune_grpo.models.lora_hf_model", "optimizer.lr=0.1"]
        + ["model.lora_dropout=0.5", "num_steps=4", "batch_size=2", "grpo_samples=4"]
        + ["max_generated_tokens=4", *NO_EVALUATION],
        "sampler_trainer_gap",
    ),
    # Nothing is paid for but entropy, and at first there is little.
    "noise": (
        [rewards("right", "quarter"), "temperature=0.05", "loss.entropy_coeff=1"]
        + ["optimizer.lr=1e-3"]
        + ["num_steps=12", "batch_size=4", "grpo_samples=4", "max_generated_tokens=16"]
        + NO_EVALUATION,
        "entropy_exploding reward_constant",
    ),
}


def events(folder: Path) -> list[dict]:
    """The findings in the run's record, and that a watch of its other events says the same."""
    cfg = read_config(OmegaConf.load(folder / "torchtune_config.yaml"))
    names = [node.get("name") or node._component_.rpartition(".")[2] for node in cfg.rewards]
    watch = Watch(cfg, names, decider=names[0])
    found = [
        {"kind": "finding", "step": event["step"], **each}
        for event in read(folder, "step", "evaluation")
        for each in watch.add(event)
    ]
    assert read(folder, "finding") == found
    return found


def start(name: str, folder: Path, *more: str) -> list[dict]:
    overrides, _ = RUNS[name]
    (folder / "provoking.py").write_text(PARTS)
    run(tiny_llama.__file__, "tiny_llama", "--steps", 0, cwd=folder)
    common = ["--config", "tiny_arithmetic_grpo", "model_dir=tiny_llama", "lr_scheduler=null"]
    tune("run", RECIPE, *common, "output_dir=out", *overrides, *more, cwd=folder)
    return events(folder / "out")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_provokes_its_findings(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    lines = start(name, tmp_path)
    assert {*RUNS[name][1].split()} <= {each["name"] for each in lines if each["event"] == "begins"}


def test_a_resumed_run_finds_the_same(tmp_path, monkeypatch):
    """Also what began before it, and what had not gone on for long enough."""
    monkeypatch.syspath_prepend(tmp_path)
    once = start("nothing_works", tmp_path, "saving.every_n_steps=4")
    shutil.rmtree(tmp_path / "out" / "step_000007")
    again = start("nothing_works", tmp_path, "resume_from_checkpoint=true")
    keys = ("step", "event", "name", "since")  # seconds differ
    assert [[line[key] for key in keys] for line in again] == [
        [line[key] for key in keys] for line in once
    ]
    assert {(line["step"] > 4, line["since"]) for line in again} == {(False, 1), (True, 1)}


def test_every_finding_is_provoked():
    assert {name for _, expected in RUNS.values() for name in expected.split()} == {*BEGINS_AFTER}
