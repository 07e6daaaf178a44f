"""The examples of docs/extending.md, as they stand on the page: a loss, and a forked recipe."""

import math
import re
from pathlib import Path

import pytest
import yaml
from runs import (
    LENGTH_REWARD,
    NO_EVALUATION,
    OF_LENGTH,
    SGD,
    copy_recipe,
    distance,
    metrics,
    run,
    run_ranks,
    run_tiny,
    tiny_overrides,
    tune,
    weights,
)

LORA = "llama3_2_1B_lora_grpo"
PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
REWARDS = """
def reward_letters(prompts, completions, weight, **columns):
    return [float(sum(map(ord, c)) % 7) if n % 3 else 1.0 for c, n in zip(completions, weight)]
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def fork(folder: Path) -> None:
    """Copy the recipe and change it as the page says; put the page's last loss beside it."""
    copy_recipe(LORA, folder)
    path = folder / "my_grpo.py"
    source = path.read_text()
    _, above, methods, loss = blocks("python")
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
    """Make a fork in a folder; return the overrides to run it."""
    folder.mkdir()
    fork(folder)
    (folder / "my_rewards.py").write_text(REWARDS)
    own = ["rewards=[my_rewards.reward_letters]", "loss=my_loss.WeightedLoss"]
    own += ["grpo_samples=6", "seed=2"]
    return [*tiny_overrides(LORA, folder), *NO_EVALUATION, *SGD, *own, *more]


@pytest.mark.slow
def test_a_fork_trains_on_some_rows_on_one_rank_and_on_two(tmp_path):
    changes = settings(tmp_path / "one", "batch_size=4")
    command = ["run", "my_grpo.py", "--config", "my_config.yaml", *changes]
    check = ["-m", "torchtune_grpo", "config", "my_config.yaml", "--table", "my_grpo.MyConfig"]
    checked = run(*check, *changes, "trained_samples=5", cwd=tmp_path / "one")
    assert "no mistake found" in checked.out
    wrong = run(*check, *changes, "trained_sampels=2", cwd=tmp_path / "one", check=False)
    assert "Did you mean trained_samples?" in wrong.err
    tune(*command, cwd=tmp_path / "one")
    one = tmp_path / "one" / "out"
    for line in metrics(one):  # of all six, whose std is 1, the mean could hardly be so large
        assert line["advantage_of_trained"] > 0.9 * line["frac_informative_groups"] > 0
    expected = weights(one / "step_000002")
    tune(*command, "trained_samples=6", f"output_dir={tmp_path}/all", cwd=tmp_path / "one")
    assert distance(weights(tmp_path / "all" / "step_000002"), expected) > 1e-4

    two = tmp_path / "two"
    changes = settings(two, "batch_size=2", "optimizer.fused=false")
    run_ranks("--config", LORA, *changes, ranks=2, cwd=two, recipe=two / "my_grpo.py")
    assert distance(weights(two / "out" / "step_000002"), expected) <= 1e-5
    for got, want in zip(metrics(two / "out"), metrics(one), strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward", "advantage_of_trained"):
            assert got[key] == pytest.approx(want[key], abs=1e-5, rel=1e-4), key


def test_the_example_of_a_loss_trains(tmp_path):
    """At most 20 lines; weights move, and the loss's own metric is in each step's log."""
    source, node = blocks("python")[0], blocks("yaml")[0]
    (own,) = re.findall(r"The metric `([\w/]+)`", PAGE)
    assert len(source.splitlines()) <= 20
    (tmp_path / "my_loss.py").write_text(source)
    (tmp_path / "my_rewards.py").write_text(LENGTH_REWARD)
    settings = [f"{name}={value}" for name, value in yaml.safe_load(node).items()]
    settings += [OF_LENGTH, *SGD, *NO_EVALUATION, "~optimizer.fused", "ppo_epochs=2"]
    run_tiny(LORA, tmp_path, "~loss", *settings)
    assert distance(weights(tmp_path / "llama"), weights(tmp_path / "out" / "step_000002")) > 1e-3
    steps = metrics(tmp_path / "out")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step[own]) for step in steps)
