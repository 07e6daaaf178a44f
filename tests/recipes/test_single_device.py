"""The single-device recipe, through the real ``tune`` command, on every shipped config."""

import math
from pathlib import Path

import pytest
import torch
from runs import (
    EAGER,
    FROM_FOLDER,
    LENGTH_REWARD,
    OF_LENGTH,
    adapter,
    completions,
    distance,
    metrics,
    run_tiny,
    steps_of,
    weights,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from torchtune_grpo.config.command_line import config_files
from torchtune_grpo.models import HFCheckpointer, hf_tokenizer

MAKE_THEIR_DATA = {"tiny_arithmetic_grpo", "smollm2_135M_grpo", "smollm2_calculator_grpo"}
MAKE_THEIR_DATA |= {"tiny_guess_grpo"}
# These differ from another one, which runs, by their model alone: here all models are tiny.
LARGER = {"llama3_2_3B_lora_grpo", "qwen3_1_7B_lora_grpo"}
HUB_CONFIGS = [name for name in config_files() if name not in MAKE_THEIR_DATA | LARGER]
LORA, FULL = "llama3_2_1B_lora_grpo", "llama3_2_1B_full_grpo"
# tests/golden has the names of those that do not depend on the machine.
TIMES = "time/rollout time/reward time/logprobs time/update step_time tokens_per_second".split()


@pytest.mark.slow
@pytest.mark.parametrize("config", HUB_CONFIGS)
def test_shipped_config_runs_two_steps(tmp_path, config):
    """Only model, checkpoint and data are tiny; all metrics are there and finite.

    A model from a folder is saved as such a folder, for transformers and for a next run.
    """
    run_tiny(config, tmp_path, **EAGER)
    out = tmp_path / "out"
    steps, folder = steps_of(out), out / "step_000002"
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert not [name for name in {*record, *TIMES} if not math.isfinite(record[name])]
    assert [r["step"] for r in metrics(out) if "eval/accuracy" in r] == [0, 2]
    # bf16 rounds differently in the sampler and in the trainer, but they are the same policy
    assert all(record["sampling/sampling_logp_difference/mean"] < 0.05 for record in steps)
    assert bool(adapter(folder)) == ("full" not in config)
    assert (folder / "config.json").exists() and weights(folder)
    record = completions(out)[0]
    assert {"step", "prompt", "completion", "reward", "rewards", "advantage"} <= record.keys()
    logged = next((out / "logs").glob("log_*.txt")).read_text()
    assert "reward:" in logged and "eval/accuracy:" in logged
    if config in FROM_FOLDER:
        _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values())
        base, saved = (hf_tokenizer(str(each)) for each in (tmp_path / "model", folder))
        assert saved.stop_tokens == base.stop_tokens and 0 in base.stop_tokens
        prompt = [{"role": "user", "content": "2 plus 2?"}]
        assert saved.chat_text(prompt) == base.chat_text(prompt)
        HFCheckpointer(str(folder), str(tmp_path)).load_checkpoint()


def run_variant(folder: Path, *more: str, config: str = LORA, **settings):
    """Run in fp32 with a reward that always has spread, so that weights move."""
    (folder / "my_rewards.py").write_text(LENGTH_REWARD)
    base = ("dtype=fp32", "lr_scheduler.num_warmup_steps=0", "optimizer.lr=1e-2")
    base += ("eval_dataset.num_samples=4", OF_LENGTH)
    return run_tiny(config, folder, *base, *more, **settings)


TENSORBOARD = "metric_logger=torchtune.training.metric_logging.TensorBoardLogger"
PROFILER = ["with_stack=False", "enabled=True", "wait_steps=0", "warmup_steps=1", "active_steps=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        ["ppo_epochs=2", TENSORBOARD, "model.use_dora=True"],
        ["optimizer=torchao.optim.AdamW8bit", "loss.kl_coeff=0"]
        + ["sampling.top_k=20", "sampling.top_p=0.9", "clip_grad_norm=null", "lr_scheduler=null"]
        + ["max_generated_tokens=4"]
        + [f"profiler.{key}" for key in PROFILER],
    ],
    ids=["two_epochs", "no_reference"],
)
def test_variants_train(tmp_path, variant):
    run_variant(tmp_path, *variant, **EAGER)
    out = tmp_path / "out"
    assert distance(weights(tmp_path / "llama"), weights(out / "step_000002")) > 1e-3
    steps = steps_of(out)
    assert all(r["frac_informative_groups"] > 0 for r in steps)
    if TENSORBOARD in variant:
        (events,) = (out / "logs").rglob("events.out.tfevents.*")
        logged = EventAccumulator(str(events)).Reload().Tensors("loss")
        losses = [float(each.tensor_proto.float_val[0]) for each in logged]
        assert losses == [pytest.approx(each["loss"]) for each in steps]
        assert steps[1]["kl"] > 1e-6
    else:
        assert "kl" not in steps[0]
        assert list((out / "profiling_outputs").rglob("*trace*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("qwen3_0_6B_lora_grpo", ["model.use_dora=True", "model.lora_dropout=0.5"]),
        (FULL, []),
        (FULL, ["optimizer=torch.optim.AdamW"]),
    ],
    ids=["float32_adapters", "stochastic_rounding", "float32_masters"],
)
def test_resume_continues_where_the_run_stopped(tmp_path, config, more):
    """3 steps at once equal 2 steps and, resumed, another: weights to the last bit, and the log.

    In bf16, where what is kept is more than what is computed with. Adapters train with dropout, so
    that torch's generator has to continue too.
    """
    settings = ["dtype=bf16", "optimizer.lr=1e-4", "num_steps=3", "saving.every_n_steps=2", *more]
    run_variant(tmp_path, *settings, config=config, **EAGER)
    out = tmp_path / "out"
    first = (out / "step_000003").rename(tmp_path / "once")
    rewards = [(r["step"], r["reward"]) for r in steps_of(out)]
    assert len(rewards) == 3
    run_variant(tmp_path, *settings, "resume_from_checkpoint=True", config=config, **EAGER)
    assert [(r["step"], r["reward"]) for r in steps_of(out)] == rewards
    for read in (weights, kept):
        once, again = read(first), read(out / "step_000003")
        assert again.keys() == once.keys(), read
        assert all(torch.equal(again[name], once[name]) for name in once), read
    assert {value.dtype for value in weights(first).values()} == {torch.bfloat16}
    small = "master" if config == FULL else "lora_B"
    assert all(value.dtype == torch.float32 for name, value in once.items() if small in name)
    assert any(small in name for name in once) or not more


def kept(folder: Path) -> dict[str, torch.Tensor]:
    """Read the adapter in PEFT's form, and the optimizer's tensors."""
    state = torch.load(folder / "training_state.pt", weights_only=True)["optimizer"]["state"]
    tensors = {f"{n}.{name}": value for n, entry in state.items() for name, value in entry.items()}
    tensors = {name: t.dequantize() if hasattr(t, "qmap") else t for name, t in tensors.items()}
    return tensors | adapter(folder)
