"""The single-device recipe, through the real ``tune`` command, on every shipped config."""

import json
import math
from pathlib import Path

import pytest
import torch
from runs import EAGER, FROM_FOLDER, copy_recipe, metrics, run_tiny, tiny_overrides, tune
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torchtune_grpo.models import HFCheckpointer, hf_tokenizer

CONFIGS = sorted(
    p.stem for p in (Path(__file__).parents[2] / "recipes/configs").glob("*_grpo.yaml")
)
HUB_CONFIGS = [name for name in CONFIGS if "tiny" not in name]
EXPECTED_METRICS = """
reward reward_std frac_reward_zero_std frac_informative_groups rewards/correctness/mean
rewards/correctness/std rewards/format/mean completions/mean_length completions/clipped_ratio kl
entropy clip_ratio/low_mean clip_ratio/high_mean loss grad_norm learning_rate time/rollout
time/reward time/logprobs time/update step_time tokens_per_second num_tokens
sampling/sampling_logp_difference/mean
""".split()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("model*.safetensors")))


@pytest.mark.parametrize("config", HUB_CONFIGS)
def test_shipped_config_runs_two_steps(tmp_path, config):
    """Only model, checkpoint, data and device are made tiny; all metrics come and are finite.

    What is saved of a model from its folder is such a folder, for transformers and for a next run.
    """
    run_tiny(config, tmp_path, **EAGER)
    records = metrics(tmp_path / "out")
    steps = [record for record in records if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2]
    for name in EXPECTED_METRICS:
        assert all(math.isfinite(record[name]) for record in steps), name
    assert [r["step"] for r in records if "eval/accuracy" in r] == [0, 2]
    # bf16 rounds differently in the sampler and in the trainer, but they are the same policy
    assert all(record["sampling/sampling_logp_difference/mean"] < 0.05 for record in steps)
    folder = tmp_path / "out" / "step_000002"
    assert (folder / "adapter" / "adapter_model.safetensors").exists() == ("full" not in config)
    assert (folder / "config.json").exists() and weights(folder)
    completions = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
    record = json.loads(completions[0])
    assert {"step", "prompt", "completion", "reward", "rewards", "advantage"} <= record.keys()
    logged = next((tmp_path / "out" / "logs").glob("log_*.txt")).read_text()
    assert "reward:" in logged and "eval/accuracy:" in logged
    if config in FROM_FOLDER:
        _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values())
        base, saved = (hf_tokenizer(str(each)) for each in (tmp_path / "model", folder))
        assert saved.stop_tokens == base.stop_tokens and 0 in base.stop_tokens
        prompt = [{"role": "user", "content": "2 plus 2?"}]
        assert saved.chat_text(prompt) == base.chat_text(prompt)
        HFCheckpointer(str(folder), str(tmp_path)).load_checkpoint()


LENGTH_REWARD = """
def reward_length(prompts, completions, **columns):
    return [float(len(c) % 7) for c in completions]
"""


def run_variant(folder: Path, *more: str, config: str = "llama3_2_1B_lora_grpo", **settings):
    """A run in fp32 whose reward, a user's own file, always has spread, so that weights move."""
    (folder / "my_rewards.py").write_text(LENGTH_REWARD)
    reward = "rewards=[{_component_: my_rewards.reward_length}]"
    base = ("dtype=fp32", "lr_scheduler.num_warmup_steps=0", "optimizer.lr=1e-2")
    base += ("eval_dataset.num_samples=4",)
    return run_tiny(config, folder, *base, reward, *more, **settings)


def changed(folder: Path) -> float:
    base = load_file(folder / "llama" / "model.safetensors")
    after = weights(folder / "out" / "step_000002")
    return max((after[name] - base[name]).abs().max().item() for name in base)


TENSORBOARD = "metric_logger=torchtune.training.metric_logging.TensorBoardLogger"
PROFILER = ["enabled=True", "wait_steps=0", "warmup_steps=1", "active_steps=1"]


@pytest.mark.parametrize(
    "variant",
    [
        ["ppo_epochs=2", TENSORBOARD],
        ["model.use_dora=True", "enable_activation_checkpointing=False"],
        ["optimizer=torchao.optim.AdamW8bit", "~optimizer.fused"],
        ["loss.kl_coeff=0", "sampling.top_k=20", "sampling.top_p=0.9", "clip_grad_norm=null"]
        + ["lr_scheduler=null", *(f"profiler.{key}" for key in PROFILER)],
    ],
    ids=["ppo_epochs", "dora", "adamw8bit", "no_reference_profiled"],
)
def test_variants_train(tmp_path, variant):
    run_variant(tmp_path, *variant, **EAGER)
    assert changed(tmp_path) > 1e-3
    steps = [r for r in metrics(tmp_path / "out") if "reward" in r]
    assert all(r["frac_informative_groups"] > 0 for r in steps)
    if TENSORBOARD in variant:
        assert list((tmp_path / "out" / "logs").rglob("events.out.tfevents.*"))
    if "loss.kl_coeff=0" in variant:
        assert "kl" not in steps[0]
        assert list((tmp_path / "out" / "profiling_outputs").rglob("*trace*"))
    else:
        assert steps[0]["kl"] < 1e-9 or "ppo_epochs=2" in variant
        assert steps[1]["kl"] > 1e-6  # the reference stayed where it was while the policy moved


def test_the_step_does_not_depend_on_how_it_is_cut(tmp_path):
    """Micro-batches of 8 or 2 rows, activation checkpointing on or off: the same weights.

    With SGD, because Adam turns a gradient of rounding noise into a full step of either sign.
    """
    sgd = ["optimizer=torch.optim.SGD", "optimizer.lr=1.0"]
    results = []
    for name, more in {
        "whole": ["forward_batch_size=8", "enable_activation_checkpointing=False"],
        "cut": ["forward_batch_size=2", "enable_activation_checkpointing=True"],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        run_variant(folder, *sgd, *more)
        assert changed(folder) > 1e-3
        results.append(weights(folder / "out" / "step_000002"))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], atol=1e-5, rtol=0)


def test_compiled_layers_train_like_eager_ones(tmp_path):
    """torch.compile captures the layers (aot_eager keeps the test short); weights agree.

    With SGD, because the two attend to packed groups in different ways, and round differently.
    """
    sgd = ["optimizer=torch.optim.SGD", "optimizer.lr=1.0"]
    results = []
    for name, more in {"eager": [], "compiled": ["compile=True"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        run_variant(folder, *sgd, *more, TORCH_COMPILE_BACKEND="aot_eager")
        assert changed(folder) > 1e-3
        results.append(weights(folder / "out" / "step_000002"))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], atol=1e-5, rtol=0)
    done = run_variant(tmp_path, "compile=True", check=False, TORCH_COMPILE_BACKEND="no_such_one")
    assert done.code != 0 and "no_such_one" in done.err  # so the others really were compiled


FULL = "llama3_2_1B_full_grpo"


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("qwen3_0_6B_lora_grpo", ["model.use_dora=True", "model.lora_dropout=0.5"]),
        (FULL, []),
        (FULL, ["optimizer=torch.optim.AdamW", "~optimizer.bf16_stochastic_round"]),
    ],
    ids=["float32_adapters", "stochastic_rounding", "float32_masters"],
)
def test_resume_continues_where_the_run_stopped(tmp_path, config, more):
    """4 steps at once equal 2 steps and, resumed, 2 more: weights to the last bit, and the log.

    In bf16, where what is kept is more than what is computed with. Adapters train with dropout, so
    that torch's generator has to continue too.
    """
    settings = ["dtype=bf16", "optimizer.lr=1e-4", "num_steps=4", "saving.every_n_steps=2", *more]
    run_variant(tmp_path, *settings, config=config, **EAGER)
    out = tmp_path / "out"
    first = (out / "step_000004").rename(tmp_path / "once")
    rewards = [(r["step"], r["reward"]) for r in metrics(out) if "reward" in r]
    assert len(rewards) == 4
    run_variant(tmp_path, *settings, "resume_from_checkpoint=True", config=config, **EAGER)
    assert [(r["step"], r["reward"]) for r in metrics(out) if "reward" in r] == rewards
    for read in (weights, kept):
        once, again = read(first), read(out / "step_000004")
        assert all(torch.equal(again[name], once[name]) for name in once), read
    assert {value.dtype for value in weights(first).values()} == {torch.bfloat16}
    small = "master" if "~optimizer.bf16_stochastic_round" in more else "lora_B"
    assert all(value.dtype == torch.float32 for name, value in once.items() if small in name)
    assert any(small in name for name in once) or not more


def kept(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter in PEFT's form, and the optimizer's tensors."""
    state = torch.load(folder / "training_state.pt", weights_only=True)["optimizer"]["state"]
    tensors = {f"{n}.{name}": value for n, entry in state.items() for name, value in entry.items()}
    tensors = {name: t.dequantize() if hasattr(t, "qmap") else t for name, t in tensors.items()}
    file = folder / "adapter" / "adapter_model.safetensors"
    return tensors | (load_file(file) if file.exists() else {})


def test_a_new_run_sets_the_previous_one_aside_and_deletes_old_checkpoints(tmp_path):
    run_variant(tmp_path, "num_steps=1")
    run_variant(tmp_path, "num_steps=3", "saving.every_n_steps=1", "saving.keep_last=2")
    old = tmp_path / "out" / "previous_runs" / "1"
    assert (old / "step_000001").is_dir() and (old / "run.jsonl").exists()
    assert len([r for r in metrics(tmp_path / "out") if "reward" in r]) == 3
    names = sorted(p.name for p in (tmp_path / "out").glob("step_*"))
    assert names == ["step_000002", "step_000003"]


def test_a_copied_recipe_and_config_run_from_an_empty_folder(tmp_path):
    """And torchtune's own ``tune run generate`` reads the weights that they save."""
    config = "llama3_2_1B_lora_grpo"
    overrides = tiny_overrides(config, tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    copy_recipe(config, work)
    tune("run", "my_grpo.py", "--config", "my_config.yaml", *overrides, cwd=work)
    folder = tmp_path / "out" / "step_000002"
    shapes = [
        o
        for o in tiny_overrides("llama3_2_1B_full_grpo", tmp_path)
        if o.startswith(("model.", "tokenizer."))
    ]
    done = tune(
        "run", "generate", "--config", "generation",
        "model=torchtune.models.llama3_2.llama3_2",
        "tokenizer=torchtune.models.llama3.llama3_tokenizer",
        *shapes,
        f"checkpointer.checkpoint_dir={folder}",
        f"checkpointer.checkpoint_files=[{next(folder.glob('model-*.safetensors')).name}]",
        "checkpointer.model_type=LLAMA3_2",
        f"checkpointer.output_dir={tmp_path / 'generated'}",
        "device=cpu", "dtype=fp32", "max_new_tokens=5",
        cwd=tmp_path,
    )  # fmt: skip
    assert "Time for inference" in done.err
