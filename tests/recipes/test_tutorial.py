"""docs/tutorial.md: its files and commands as they stand, on the tiny model and its questions."""

import csv
import gzip
import json
import re
import shlex
from pathlib import Path

import pytest
from runs import TUNE, run

import torchtune_grpo.data

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
SHORTER = "num_steps: 6\nbatch_size: 8\nevaluation: {every_n_steps: 6}\n"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


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

    for text in blocks("python") + blocks("yaml"):
        (tmp_path / text.split()[1]).write_text(text)
    before, train, broken = (text.splitlines() for text in blocks("bash"))
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
