"""The recipe of docs/forking.md: a copy, changed as the page says, drops groups and adds some."""

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import copy_recipe, metrics, run_ranks, tiny_overrides, tune
from safetensors.torch import load_file

from torchtune_grpo._plugin import config_files
from torchtune_grpo.config import GRPOConfig
from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.read_config import read_config

LORA, FULL = "llama3_2_1B_lora_grpo", "llama3_2_1B_full_grpo"
PAGE = Path(__file__).parents[2] / "docs" / "forking.md"
ROWS = 12
# In which steps a prompt teaches something: its completions' letters decide, else nothing does.
REWARD = """
TEACHES = {teaches}

def reward_some(prompts, completions, trainer_state, weight, **columns):
    step = trainer_state.global_step
    return [
        float(sum(map(ord, text)) % 7) if n in TEACHES[step] else 1.0
        for text, n in zip(completions, weight)
    ]
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def fork(folder: Path, config: str) -> None:
    """``tune cp``, then the page: classes and imports, methods, replaced lines, and the loss."""
    copy_recipe(config, folder)
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
        at, end = there.span() if there else 2 * (source.index("    def grpo_step("),)
        source = source[:at] + indented + source[end:]
    path.write_text(source.replace("\nclass ", f"\n{above}\n\nclass ", 1))


def settings(folder: Path, config: str, teaches: dict[int, set[int]], *more: str) -> list[str]:
    """A fork in a folder, with a reward that says which prompts teach, and the overrides to run."""
    folder.mkdir()
    fork(folder, config)
    (folder / "my_rewards.py").write_text(REWARD.format(teaches=teaches))
    with (folder / "weighted.jsonl").open("w") as file:
        for n in range(ROWS):
            row = {"question": f"{n} plus 2?", "answer": f"#### {n + 2}", "weight": n}
            file.write(json.dumps(row) + "\n")
    return [
        *tiny_overrides(config, folder),
        f"dataset.data_files={folder}/weighted.jsonl",
        "rewards=[{_component_: my_rewards.reward_some}]",
        "loss=my_loss.WeightedLoss",
        "eval_dataset=null",
        "eval_every_n_steps=null",
        "dtype=fp32",
        "grpo_samples=4",
        "seed=2",
        "save_every_n_steps=1",
        "keep_last_n_checkpoints=null",
        *more,
    ]


def prompts(first: int, last: int) -> list[int]:
    """The rows of the data set that a run draws first, next, ...: of these numbers."""
    return ShuffledSampler(range(ROWS), seed=2).next(last - first + 1, skip=first)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(next((out / f"step_{step:06d}").glob("model-*.safetensors")))


def optimizer(out: Path, step: int) -> list[torch.Tensor]:
    state = torch.load(out / f"step_{step:06d}" / "training_state.pt", weights_only=True)
    entries = state["optimizer"]["state"].values()
    return [torch.as_tensor(value) for entry in entries for value in entry.values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_fork_drops_refills_and_skips_a_step(tmp_path):
    """Step 1 is full at once, 2 has nothing, 3 fills up, 4 (resumed) keeps one group of three."""
    work = tmp_path / "work"
    teaches = {0: set(prompts(0, 1)), 1: set()}  # which draws two, and two more
    teaches |= {2: {prompts(6, 6)[0], *prompts(8, 9)}, 3: {prompts(14, 14)[0]}}
    assert not teaches[3] & set(prompts(10, 13))
    adam = ["optimizer=torch.optim.AdamW", "optimizer.lr=1e-2", "lr_scheduler.num_warmup_steps=0"]
    changes = settings(work, LORA, teaches, *adam, "batch_size=2", "loss.kl_coeff=0.1")
    command = ["run", "my_grpo.py", "--config", "my_config.yaml", *changes]
    tune(*command, "max_rollouts=2", "num_steps=3", cwd=work)
    out = work / "out"
    one, two, three = (list(weights(out, step).values()) for step in (1, 2, 3))
    assert same(one, two) and not same(two, three)
    assert same(optimizer(out, 1), optimizer(out, 2)) and optimizer(out, 1)
    done = metrics(out)
    assert [line["rollouts"] for line in done] == [1, 2, 2]
    assert [line["frac_informative_groups"] for line in done] == [1, 0, 0.75]
    assert (done[1]["loss"], done[1]["grad_norm"]) == (0, 0) and "entropy" not in done[1]
    first, second, third = (line["learning_rate"] for line in done)
    assert first > second > third

    again = ["resume_from_checkpoint=true", "max_rollouts=3", "num_steps=4"]
    resumed = tune(*command, *again, cwd=work)
    assert "max_rollouts 2 -> 3" in resumed.out + resumed.err
    assert metrics(out)[3]["rollouts"] == 3 and not same(three, list(weights(out, 4).values()))


VARIANTS = {
    LORA: {"replicated": ["optimizer.fused=false"]},
    FULL: {
        "sharded": ["forward_batch_size=4"],
        "budget": [
            "forward_batch_size=null",
            "forward_token_budget=90",
            "distributed.defer_gradients=always",
        ],
    },
}


@pytest.mark.parametrize("config", VARIANTS)
def test_ranks_keep_different_numbers_of_rows(tmp_path, config):
    """Rank 1 keeps none, then nobody any, then one and two groups: the same steps as one rank.

    Without momentum nothing would tell a step on zeros from none.
    """
    teaches = {0: set(prompts(0, 1)), 1: set(), 2: set(prompts(9, 11))}
    sgd = ["optimizer=torch.optim.SGD", "optimizer.lr=0.5", "optimizer.momentum=0.9"]
    sgd += ["lr_scheduler=null", "max_rollouts=1", "num_steps=3"]
    sgd += ["~optimizer.bf16_stochastic_round"] if config == FULL else []
    changes = settings(tmp_path / "one", config, teaches, *sgd, "batch_size=4")
    tune("run", "my_grpo.py", "--config", "my_config.yaml", *changes, cwd=tmp_path / "one")
    one = tmp_path / "one" / "out"
    first, second, third = (list(weights(one, step).values()) for step in (1, 2, 3))
    assert same(first, second) and not same(second, third)
    for name, more in VARIANTS[config].items():
        folder = tmp_path / name
        changes = settings(folder, config, teaches, *sgd, "batch_size=2", *more)
        recipe = folder / "my_grpo.py"
        run_ranks("--config", config, *changes, ranks=2, cwd=folder, recipe=recipe)
        for step in (1, 2, 3):
            expected = weights(one, step)
            for key, value in weights(folder / "out", step).items():
                torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0, msg=name)
        for got, want in zip(metrics(folder / "out"), metrics(one), strict=True):
            assert got.keys() == want.keys()
            for key in ("loss", "grad_norm", "entropy", "reward", "frac_informative_groups"):
                if key in want:
                    assert got[key] == pytest.approx(want[key], abs=1e-5, rel=1e-4), key


def test_keys_of_a_fork_are_checked_like_all(tmp_path):
    space: dict = {}
    exec(blocks("python")[0], space)
    cfg = OmegaConf.load(config_files()[LORA])
    cfg.output_dir = str(tmp_path)
    assert read_config(cfg, table=space["MyConfig"]).max_rollouts == 3
    for key, value, said in (
        ("max_rolouts", 2, "Did you mean max_rollouts?"),
        ("max_rollouts", 0, "give a number above 0"),
        ("max_rollouts", "many", "not of type int"),
    ):
        with pytest.raises(ValueError, match=said):
            read_config(OmegaConf.merge(cfg, {key: value}), table=space["MyConfig"])
    with pytest.raises(ValueError, match="max_rollouts=2: unknown"):
        read_config(OmegaConf.merge(cfg, {"max_rollouts": 2}), table=GRPOConfig)
