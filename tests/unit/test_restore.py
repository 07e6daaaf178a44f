"""Changes to the config that a resumed run allows, and the optimizer's restored state."""

import json
from pathlib import Path

import pytest
import torch
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from torchtune_grpo.checkpoint.resume import (
    FIXED,
    changed_keys,
    optimizer_state,
    refuse_changes,
    restore_optimizer,
    run_config,
)
from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.config.keys import GRPOConfig


def settings(folder: Path, *changes: str) -> GRPOConfig:
    """A shipped config with its files in a folder."""
    files = [f"tokenizer.path={folder / 'tokens'}", f"output_dir={folder}"]
    cfg = load_config("llama3_2_1B_lora_grpo", [*files, *changes])
    if any(change.startswith("model=") for change in changes):
        cfg.model = {"_component_": cfg.model._component_}  # without the other one's arguments
    return read_config(cfg)


def config_of(folder: Path, *changes: str, tokens="abc", base="0" * 9) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / "tokens").write_text(tokens)
    (folder / "model.safetensors").write_text(base)
    return run_config(settings(folder, *changes), base_files=[folder / "model.safetensors"])


def check(old: dict, new: dict) -> None:
    refuse_changes(old, new, FIXED, checkpoint=Path("step_000003"), remedy="start afresh")


def test_what_may_change_is_told_and_moved_files_are_the_same(tmp_path):
    old = config_of(tmp_path / "a")
    changes = ["optimizer.lr=1e-6", "optimizer.betas=[0.9,0.95]", "rewards[0].weight=3"]
    changes += ["num_steps=7", "lr_scheduler.num_warmup_steps=1", "resume_from_checkpoint=true"]
    new = config_of(tmp_path / "b", *changes)
    check(old, new)
    changed = changed_keys(old, new)
    assert changed["num_steps"] == (old["num_steps"], 7)
    assert changed["rewards.0.weight"] == (1.0, 3)
    assert set(changed) == {
        "optimizer.lr", "optimizer.betas.0", "optimizer.betas.1", "num_steps", "output_dir",
        "rewards.0.weight", "lr_scheduler.num_warmup_steps", "checkpointer.output_dir",
        "metric_logger.log_dir", "profiler.output_dir",
    }  # fmt: skip
    assert changed_keys(old, old) == {}
    assert torch.__version__.startswith(old["versions.torch"])  # which may lack "+cu130"
    check(old | {"versions.torch": "2.0"}, old)  # is only said


def with_rows(folder: Path, source: str) -> dict:
    return config_of(folder, "dataset=torchtune_grpo.data.RLDataset", f"dataset.source={source}")


def test_changed_rows_of_a_folder_or_a_pattern_are_refused(tmp_path):
    """Whichever file has changed; a run of 0.2, which has noted no digest, goes on."""
    rows = tmp_path / "rows"
    (rows / "train").mkdir(parents=True)
    for name in ("a", "b"):
        (rows / "train" / f"{name}.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}')
    for source in (str(rows), f"{rows}/**/*.jsonl"):
        old = with_rows(tmp_path, source)
        check(old, with_rows(tmp_path, source))
        (rows / "train" / "b.jsonl").write_text(f'{{"prompt": "{source}", "answer": "2"}}')
        new = with_rows(tmp_path, source)
        with pytest.raises(ValueError, match="^dataset.source files=2 files, .* was made with 2 "):
            check(old, new)
        check({key: value for key, value in old.items() if " files" not in key}, new)


def test_columns_splits_tasks_and_texts_are_no_files(tmp_path, monkeypatch):
    """Although a folder has the name of a column, such as the run's own, or a text has a "?"."""
    monkeypatch.chdir(tmp_path)
    changes = ["dataset.columns={answer: output}", "dataset.system_prompt='How many?'"]
    changes += ["dataset.task=sum", "dataset.name=main"]
    folders = ("output", "train", "sum", "main")
    for name in folders:
        (tmp_path / name).mkdir()
    old = config_of(tmp_path / "run", *changes)
    for name in folders:
        (tmp_path / name / "new").touch()
    check(old, config_of(tmp_path / "run", *changes))
    assert not [key for key in old if key.endswith(" files")]


def test_another_order_of_mixed_data_and_other_parts_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl.gz"
    rows.write_text("some")

    def mixed(*names: str, **more: object) -> dict:
        part = {"_component_": "torchtune_grpo.data.RLDataset", "source": str(rows), **more}
        parts = dict.fromkeys(names, part)
        node = {"_component_": "torchtune_grpo.data.MixedDataset", "datasets": parts}
        return config_of(tmp_path, f"dataset={json.dumps(node)}")

    check(mixed("a", "b"), mixed("a", "b"))
    with pytest.raises(ValueError, match="datasets in order=b, a: .* was made with a, b"):
        check(mixed("a", "b"), mixed("b", "a"))
    with pytest.raises(ValueError, match="dataset.datasets.a.weight=3: .* was made with null"):
        check(mixed("a"), mixed("a", weight=3))
    old = mixed("a")
    rows.write_text("others")
    with pytest.raises(ValueError, match=r"datasets.a.source=rows.jsonl.gz \(sha256 "):
        check(old, mixed("a"))


REFUSED = {
    "model.lora_alpha=99": "model.lora_alpha=99: .*step_000003 was made with 64",
    "model.lora_attn_modules=[output_proj]": "model.lora_attn_modules.0=output_proj: .*q_proj",
    "model=torchtune.models.llama3_2.llama3_2_1b": "model._component_=.*llama3_2_1b: .*lora_llama",
    "dtype=fp32": "dtype=fp32: .* was made with bf16",
    "seed=4": "seed=4: .* was made with 0",
    "batch_size=3": r"batch_size \* ranks=3: .* was made with 8",
    "dataset.split=test": "dataset.split=test: .* was made with train",
    "checkpointer.model_type=QWEN2": "checkpointer.model_type=QWEN2: .* was made with LLAMA3_2",
    "optimizer=torch.optim.SGD": "optimizer._component_=torch.optim.SGD: .*torch.optim.AdamW",
    "optimizer.amsgrad=true": "optimizer.amsgrad=True: .* was made with null",
    "lr_scheduler=null": "lr_scheduler._component_=null: .* was made with torchtune",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_must_stay_is_refused_by_key_with_both_values(tmp_path, change):
    old, new = config_of(tmp_path), config_of(tmp_path, change)
    with pytest.raises(ValueError, match=f"{REFUSED[change]}.* Set it back, or start afresh"):
        check(old, new)
    if change == "lr_scheduler=null":
        with pytest.raises(ValueError, match="lr_scheduler._component_=torchtune.*with null"):
            check(new, old)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"tokens": "abd"}, "tokenizer.path"),
        ({"base": "000010000"}, "checkpointer.checkpoint_files.0"),
    ],
)
def test_a_file_with_other_contents_is_another_one(tmp_path, changed, key):
    old, new = config_of(tmp_path), config_of(tmp_path, **changed)
    with pytest.raises(ValueError, match=rf"{key}=\S+ \(sha256 \w+\): .* was made with"):
        check(old, new)


def adam(lr: float, *, horizon: int, steps: int = 0, **more):
    """Adam on one weight, with a schedule, after some steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=lr, **more)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, horizon)
    for _ in range(steps):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def test_the_configs_hyperparameters_win_over_the_saved_ones():
    """And the schedule is where it would be if they had held from the start."""
    changed = {"lr": 0.02, "horizon": 20, "betas": (0.5, 0.6), "weight_decay": 0.3}
    saved, _ = adam(0.1, horizon=9, steps=5)
    fresh, _ = adam(**changed, steps=5)
    resumed, scheduler = adam(**changed)
    restore_optimizer(resumed, scheduler, optimizer_state(saved), steps=5)
    (group,), (wanted,) = resumed.param_groups, fresh.param_groups
    assert 0 < group["lr"] == wanted["lr"] < 0.02
    for name in ("betas", "weight_decay", "initial_lr"):
        assert group[name] == wanted[name]
    (moments,), (before,) = resumed.state.values(), saved.state.values()
    assert moments["step"] == 5 and moments["exp_avg"].equal(before["exp_avg"])


def test_each_fixed_key_is_one_of_the_config(tmp_path):
    keys = config_of(tmp_path, "sampler._component_=torchtune_grpo.data.ShuffledSampler")
    for fixed in FIXED:
        assert any(key == fixed or key.startswith(f"{fixed}.") for key in keys), fixed
