"""The recipe of docs/forking.md: a copy, changed as the page says, trains on some of the rows."""

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import copy_recipe, metrics, run_ranks, tiny_overrides, tune
from safetensors.torch import load_file

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import config_files
from torchtune_grpo.config.keys import GRPOConfig

LORA = "llama3_2_1B_lora_grpo"
PAGE = Path(__file__).parents[2] / "docs" / "forking.md"
ROWS = 12
REWARDS = """
def reward_letters(prompts, completions, weight, **columns):
    return [float(sum(map(ord, c)) % 7) if n % 3 else 1.0 for c, n in zip(completions, weight)]
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def fork(folder: Path) -> None:
    """``tune cp``, then the page: classes and imports, methods, replaced lines, and the loss."""
    copy_recipe(LORA, folder)
    path = folder / "my_grpo.py"
    source = path.read_text()
    above, methods, loss = blocks("python")
    (folder / "my_loss.py").write_text(loss)
    for block in blocks("diff"):
        old = "".join(f"{line[1:]}\n" for line in block.splitlines() if line[0] == "-")
        new = "".join(f"{line[1:]}\n" for line in block.splitlines() if line[0] == "+")
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    for method in re.split(r"\n\n\n", methods):
        indented = re.sub(r"^(?=.)", "    ", method.strip(), flags=re.M) + "\n\n"
        name = re.match(r"def (\w+)", method).group(1)
        there = re.search(rf"    def {name}\(.*?(?=^    def )", source, re.DOTALL | re.M)
        at, end = there.span() if there else 2 * (source.index("    def update("),)
        source = source[:at] + indented + source[end:]
    path.write_text(source.replace("\nclass ", f"\n{above}\n\nclass ", 1))


def settings(folder: Path, *more: str) -> list[str]:
    """A fork in a folder, and the overrides to run it."""
    folder.mkdir()
    fork(folder)
    (folder / "my_rewards.py").write_text(REWARDS)
    with (folder / "weighted.jsonl").open("w") as file:
        for n in range(ROWS):
            row = {"question": f"{n} plus 2?", "answer": f"#### {n + 2}", "weight": n}
            file.write(json.dumps(row) + "\n")
    return [
        *tiny_overrides(LORA, folder),
        f"dataset.data_files={folder}/weighted.jsonl",
        "rewards=[{_component_: my_rewards.reward_letters}]",
        "loss=my_loss.WeightedLoss",
        "eval_dataset=null",
        "evaluation.every_n_steps=null",
        "dtype=fp32",
        "grpo_samples=6",
        "seed=2",
        "optimizer=torch.optim.SGD",
        "optimizer.lr=0.5",
        "lr_scheduler=null",
        "num_steps=2",
        *more,
    ]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(next((out / f"step_{step:06d}").glob("model-*.safetensors")))


def test_a_fork_trains_on_some_rows_on_one_rank_and_on_two(tmp_path):
    changes = settings(tmp_path / "one", "batch_size=4")
    command = ["run", "my_grpo.py", "--config", "my_config.yaml", *changes]
    tune(*command, cwd=tmp_path / "one")
    one = tmp_path / "one" / "out"
    for line in metrics(one):  # of all six, whose std is 1, the mean could hardly be so large
        assert line["advantage_of_trained"] > 0.9 * line["frac_informative_groups"] > 0
    expected = weights(one, 2)
    tune(*command, "trained_samples=6", f"output_dir={tmp_path}/all", cwd=tmp_path / "one")
    every = weights(tmp_path / "all", 2)
    assert max((every[name] - expected[name]).abs().max() for name in every) > 1e-4

    two = tmp_path / "two"
    changes = settings(two, "batch_size=2", "optimizer.fused=false")
    run_ranks("--config", LORA, *changes, ranks=2, cwd=two, recipe=two / "my_grpo.py")
    for key, value in weights(two / "out", 2).items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0)
    for got, want in zip(metrics(two / "out"), metrics(one), strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward", "advantage_of_trained"):
            assert got[key] == pytest.approx(want[key], abs=1e-5, rel=1e-4), key


def test_keys_of_a_fork_are_checked_like_all(tmp_path):
    space: dict = {}
    exec(blocks("python")[0], space)
    cfg = OmegaConf.load(config_files()[LORA])
    cfg.output_dir = str(tmp_path)
    assert read_config(cfg, table=space["MyConfig"]).trained_samples == 4
    for key, value, said in (
        ("trained_sampels", 2, "Did you mean trained_samples?"),
        ("trained_samples", 0, "should be greater than 0"),
        ("trained_samples", "many", "a valid integer"),
    ):
        with pytest.raises(ValueError, match=said):
            read_config(OmegaConf.merge(cfg, {key: value}), table=space["MyConfig"])
    with pytest.raises(ValueError, match="trained_samples=2: unknown"):
        read_config(OmegaConf.merge(cfg, {"trained_samples": 2}), table=GRPOConfig)
