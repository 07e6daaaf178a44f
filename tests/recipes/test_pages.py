"""Pages of the docs, run as they stand: the tutorial, the notebook, and those on extending."""

import csv
import gzip
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from runs import (
    LENGTH_REWARD,
    NO_EVALUATION,
    OF_LENGTH,
    SGD,
    TUNE,
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

import torchtune_grpo.data

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL, EXTENDING = ((DOCS / f"{name}.md").read_text() for name in ("tutorial", "extending"))


def blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


# --- docs/tutorial.md, on the tiny model and its questions ------------------------------------

SHORTER = "num_steps: 6\nbatch_size: 8\nevaluation: {every_n_steps: 6}\n"


def write_easy_problems(path):
    """As many questions that the tiny model half knows, in the columns of the page's table."""
    shipped = Path(torchtune_grpo.data.__file__).with_name("arithmetic_train.jsonl.gz")
    with gzip.open(shipped, "rt") as file:
        rows = [row for row in map(json.loads, file) if row["level"] <= 3]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "gold"])
        table.writerows([row["question"], row["answer"]] for row in rows[:: len(rows) // 400][:400])


@pytest.mark.slow
def test_from_a_table_to_a_model_that_learned_and_to_one_that_will_not(tmp_path):
    def command(line):
        """What a line of the page prints, and its exit code."""
        program, *arguments = shlex.split(line)
        start = {"python": [], "tune": [TUNE], "torchtune-grpo": ["-m", "torchtune_grpo"]}
        done = run(*start[program], *arguments, cwd=tmp_path, check=False)
        return done.code, done.out + done.err

    for text in blocks("python", TUTORIAL) + blocks("yaml", TUTORIAL):
        (tmp_path / text.split()[1]).write_text(text)
    before, train, broken = (text.splitlines() for text in blocks("bash", TUTORIAL))
    assert command(before[0]) == (0, "")
    with (tmp_path / "problems.csv").open() as file:
        problems = [*csv.DictReader(file)]
    for row in problems:
        assert int(row["gold"]) == min(map(int, re.findall(r"\d+", row["question"])))
    assert command(before[1])[0] == 0  # the page's own config and data, without their model

    config = tmp_path / "my_config.yaml"
    tiny = config.read_text().replace("smollm2_135M_grpo", "tiny_arithmetic_grpo") + SHORTER
    config.write_text(tiny.replace('"The answer is"', '"<think>"'))
    write_easy_problems(tmp_path / "problems.csv")
    for line in before[1:] + train:
        code, said = command(line)
        assert code == 0, said
        if line.startswith("tune run"):
            assert "Significant: on 60 held-out problems" in said
    assert (tmp_path / "smallest" / "run.html").exists()
    (line,) = broken
    code, said = command(line)
    assert code == 4 and "max_generated_tokens cut off 100% of the responses" in said


# --- docs/first_run.ipynb -----------------------------------------------------------------------

# A cell's value is that of its last line, if it is an expression; `_repr_html_` shows it.
CELLS = """
import ast, json, sys

space, values = {}, []
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        *body, last = ast.parse("".join(cell["source"])).body
        if not isinstance(last, ast.Expr):
            body, last = [*body, last], None
        exec(compile(ast.Module(body, []), "cell", "exec"), space)
        value = last and eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
        values.append(shown)
        print(f"--- {shown[:2000]}")
json.dump(values, open("values.json", "w"))
"""


@pytest.mark.slow
def test_all_cells_run_and_the_model_learns(tmp_path):
    (tmp_path / "cells.py").write_text(CELLS)
    said = run("cells.py", DOCS / "first_run.ipynb", cwd=tmp_path).out
    assert "Verdict: learns" in said
    _, row, score, _, folder, answers, table, curves, page, _ = json.loads(
        (tmp_path / "values.json").read_text()
    )
    assert "'answer'" in row and score == "[1.0]" and folder.endswith("first_run/step_000012')")
    assert answers.count("<think>") == 3 and "completion" in table and "eval/accuracy" in curves
    assert page.startswith("<iframe srcdoc=") and "Significant: on 64 held-out problems" in page
    assert said.rpartition("--- <iframe")[2].count("<think>") == 1  # what the checkpoint says


# --- docs/extending.md: a loss, and a forked recipe ---------------------------------------------

LORA = "llama3_2_1B_lora_grpo"
REWARDS = """
def reward_letters(prompts, completions, weight, **columns):
    return [float(sum(map(ord, c)) % 7) if n % 3 else 1.0 for c, n in zip(completions, weight)]
"""


def fork(folder: Path) -> None:
    """Copy the recipe and change it as the page says; put the page's last loss beside it."""
    copy_recipe(LORA, folder)
    path = folder / "my_grpo.py"
    source = path.read_text()
    _, above, methods, loss = blocks("python", EXTENDING)
    (folder / "my_loss.py").write_text(loss)
    for block in blocks("diff", EXTENDING):
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
    source, node = blocks("python", EXTENDING)[0], blocks("yaml", EXTENDING)[0]
    (own,) = re.findall(r"The metric `([\w/]+)`", EXTENDING)
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
