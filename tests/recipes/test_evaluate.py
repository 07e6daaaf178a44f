"""Evaluations of real runs: what ends them, the best checkpoint, `torchtune-grpo evaluate`."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from omegaconf import OmegaConf
from runs import RECIPE, Result, metrics, run, run_ranks, tune

from torchtune_grpo.cli import evaluate as command
from torchtune_grpo.config.command_line import load_config

CONFIG = "tiny_arithmetic_grpo"
RESUME = "resume_from_checkpoint=True"
# The held-out accuracy after each step is planned: so many of four prompts are right.
PLAN = [1, 2, 3, 2, 3, 2, 4, 1]
MY_REWARDS = f"""
import os, signal, sys

def planned(prompts, completions, trainer_state, n, **columns):
    at(f"evaluation {{trainer_state.global_step}}")
    right = {PLAN}[trainer_state.global_step]
    return [float(number < right) if number < 4 else None for number in n]  # rows of training

def varied(prompts, completions, **columns):
    return [len(set(text)) / 9 for text in completions]

def at(place):  # SIGNAL=name of a place: a signal is sent there
    wanted, _, number = os.environ.get("SIGNAL", "").partition(":")
    if wanted == place:
        os.kill(os.getpid(), int(number))

def audit(event, arguments):
    if event == "os.rename" and os.path.basename(arguments[1]).startswith("step_"):
        at("save " + os.path.basename(arguments[1]).lstrip("step_0"))

sys.addaudithook(audit)
"""
DATA = "{_component_: torchtune_grpo.data.RLDataset, source: rows.jsonl"
QUICK = """
num_steps=4 optimizer.lr=5e-3 grpo_samples=2 forward_batch_size=null
max_generated_tokens=6 output_dir=out saving.every_n_steps=1 saving.keep_last=1
evaluation.samples=0 evaluation.every_n_steps=1 deciding_reward=planned
evaluation.keep_best=eval/accuracy ~dataset ~eval_dataset
""".split()
QUICK += [f"dataset={DATA}}}", f"eval_dataset={DATA}, num_samples: 4}}"]
QUICK.append("rewards=[{_component_: mine.varied}, {_component_: mine.planned, weight: 0.0}]")
ONE, TWO = "batch_size=4", "batch_size=2"


def go(folder: Path, *more: str, at: str = "", check: bool = True) -> Result:
    (folder / "mine.py").write_text(MY_REWARDS)
    rows = [
        {"prompt": f"{n} + 1?", "n": n, "answer": 7 + (n % 3 == 0), "level": n // 2}
        for n in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {"PYTHONPATH": str(folder), "SIGNAL": at}
    command = ["run", RECIPE, "--config", CONFIG, *QUICK, ONE, *more]
    return tune(*command, cwd=folder, check=check, **env)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Iterator[Path]:
    """The folder of an uninterrupted run, which tests only read.

    It saves what is the best so far, and what it ends with.
    """
    folder = tmp_path_factory.mktemp("whole")
    done = go(folder, "saving.every_n_steps=null")
    said = done.out + done.err
    assert re.findall("Saved out/step_00000(.*)", said) == ["1", "2", "4"]
    yield folder


def evaluations(out: Path) -> list[dict]:
    return [
        {name: value for name, value in record.items() if name.startswith(("step", "eval/"))}
        for record in metrics(out)
        if "eval/accuracy" in record
    ]


def kept(out: Path) -> tuple[list[str], str]:
    return sorted(path.name for path in out.glob("step_*")), os.readlink(out / "best")


def test_the_best_is_kept_beside_the_last(whole):
    """0.75 after step 2 is the best; after 3 it is worse, after 4 as good, which is not better."""
    found = {each["step"]: each["eval/accuracy"] for each in evaluations(whole / "out")}
    assert found == {0: 0.25, 1: 0.5, 2: 0.75, 3: 0.5, 4: 0.75}
    assert kept(whole / "out") == (["step_000002", "step_000004"], "step_000002")
    assert [r["step"] for r in metrics(whole / "out") if "reward" in r] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_end(whole, tmp_path):
    """Resumed with more steps it goes on until an evaluation ends it; resumed again, at once."""
    term, kill = 15, 9
    first = go(tmp_path, at=f"evaluation 2:{term}", check=False)  # dropped: is step 2 the best?
    out, both = tmp_path / "out", ["step_000001", "step_000002"]
    assert first.code == 143 and kept(out) == (both, "step_000001")
    second = go(tmp_path, RESUME, at=f"save 3:{kill}", check=False)
    assert second.code == -kill and kept(out) == (both, "step_000002")
    go(tmp_path, RESUME)
    assert kept(out) == kept(whole / "out") and evaluations(out) == evaluations(whole / "out")
    weights = [path / "step_000004" / "model.safetensors" for path in (out, whole / "out")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for saves in (True, False):
        more = go(tmp_path, RESUME, "num_steps=7", "evaluation.stop_at=1.0")
        said = more.out + more.err
        assert "step 6: eval/accuracy is 1.000, and has reached" in said
        assert ("Saved" in said) == saves
        assert kept(out) == (["step_000006"], "step_000006") and evaluations(out)[-1]["step"] == 6


@pytest.mark.slow
def test_two_ranks_end_together(whole, tmp_path):
    """They have the numbers and the best checkpoint of one rank; the policy is sharded."""
    for name in ("mine.py", "rows.jsonl"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    run_ranks("--config", CONFIG, *QUICK, TWO, ranks=2, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert kept(tmp_path / "out") == kept(whole / "out")
    assert evaluations(tmp_path / "out") == evaluations(whole / "out")


def evaluate(folder: Path, *arguments: str, ranks: int = 0, **settings) -> Result:
    """Run ``torchtune-grpo evaluate out``; of several ranks, return the first one's result."""
    settings |= {"cwd": folder, "PYTHONPATH": str(folder)}
    if ranks:
        start = ["--config", "out", *arguments]
        first, *others = run_ranks(*start, ranks=ranks, command="evaluate", **settings)
        assert not any(other.out for other in others)
        return first
    return run("-m", "torchtune_grpo", "evaluate", "out", *arguments, **settings)


def test_the_command_repeats_the_runs_evaluations(whole, tmp_path):
    """It does to the last digit; one prompt of four is right before, and three after."""
    file = tmp_path / "found.json"
    said = evaluate(whole, "--show", "2", "--output", str(file)).out
    report = json.loads(file.read_text())
    first, *_, last = evaluations(whole / "out")
    found = report["groups"]["all"]["graders"]["planned"]
    for who, logged in (("before", first), ("after", last)):
        assert logged.pop("step") in (0, 4) and logged.items() <= found[who].items()
    change = found["change"]["eval/accuracy"]
    assert (change["difference"], change["p"]) == (0.5, 0.5)  # two won, none lost: 2 / 2^2
    assert re.search(r"accuracy +0\.250 \[.*\] +0\.750 \[.*\] +\+0\.500 \[.*\] p=0.500", said)
    within = r"(?s:(?!\n=== ).)*?"  # one question's answer
    assert re.findall(rf"=== (.*)\n--- before: (.*)\n{within}--- after: (.*)\n", said) == [
        ("0 + 1?", "right", "right"),
        ("1 + 1?", "wrong", "right"),
    ]
    evaluate(whole, "--checkpoint", "best", "--output", str(file))
    best = json.loads(file.read_text())
    assert best["weights"]["after"] == "out/step_000002"
    before, after, of_best = (
        [(each["prompt"], each["greedy"]["completion"]) for each in answers]
        for answers in (*report["answers"].values(), best["answers"]["after"])
    )
    assert before != after != of_best != before  # each has weights of its own
    for wrong, told in (
        (["--checkpoint", "3"], "--checkpoint=step_000003: is not in out, which has step_000002,"),
        (["--checkpoint", "logs"], "--checkpoint=logs: is not in out, which has step_000002,"),
        (["--by", "lvl"], "--by=lvl: eval_dataset has no such column, but ['answer', 'level', "),
        (["eval_dataset=null", "eval_dataset=abc"], "eval_dataset._component_=abc: not a class"),
    ):
        done = evaluate(whole, *wrong, check=False)
        assert done.code == 1 and done.err.startswith(f"Error: {told}"), done.err


def test_a_config_may_have_no_evaluation(tmp_path, monkeypatch):
    cfg = load_config(CONFIG, ["~evaluation", f"output_dir={tmp_path}"])
    (tmp_path / "my.yaml").write_text(OmegaConf.to_yaml(cfg))
    made = []
    monkeypatch.setattr(command, "evaluate", lambda run, **_: made.append(run) or sys.exit())
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "my.yaml"), "--samples", "3"])
    with pytest.raises(SystemExit):
        command.main()
    assert made[0].cfg.evaluation.samples == 3


def test_a_killed_evaluation_goes_on_with_the_answers_it_has(whole, tmp_path):
    """On other ranks, too, but not with another config or changed rewards; the report is that of
    one in one go."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    said = evaluate(whole, "--output", str(one)).out
    assert said.endswith(f"Written to {one}\n")
    kill = {"check": False, "SIGNAL": "evaluation 4:9"}
    assert evaluate(whole, "--output", str(two), **kill).code == -9
    assert len((tmp_path / ".two.json.before").read_text().splitlines()) == 1 + 4
    assert not two.exists()
    fails_if_asked_again = {"check": False, "SIGNAL": "evaluation 0:9"}
    for config, more_code in (("seed=1", ""), ("seed=0", "# changed\n")):
        (whole / "mine.py").write_text(MY_REWARDS + more_code)
        again = evaluate(whole, config, "--output", str(two), **fails_if_asked_again)
        (whole / "mine.py").write_text(MY_REWARDS)
        assert again.code == -9
        assert evaluate(whole, "--output", str(two), **kill).code == -9
    evaluate(whole, "--output", str(two), ranks=2, SIGNAL="evaluation 0:9")
    assert two.read_bytes() == one.read_bytes() and len([*tmp_path.iterdir()]) == 2
    refused = evaluate(whole, "--output", str(tmp_path), check=False)
    assert refused.err == f"Error: --output={tmp_path}: name a file in a folder that is there.\n"


@pytest.mark.slow
def test_the_table_is_that_of_the_answers_by_any_column_and_on_two_ranks(whole, tmp_path):
    """Each answer begins with the prefill, hence every strict verdict is known: the gold is 7.

    What is sampled behind it makes the last number, which is counted here anew.
    """
    arguments = [
        *("--base", "--samples", "4", "--by", "level", "deciding_reward=null"),
        "eval_dataset.num_samples=8",
        "eval_dataset.prefill='<think>.</think><answer>7</answer>'",
        "evaluation.sampling.temperature=9",  # or nothing is written behind it
        "rewards=[{_component_: torchtune_grpo.rewards.last_number_reward, name: last, weight: 0},"
        "{_component_: torchtune_grpo.rewards.math_correctness_reward, name: right},"
        "{_component_: mine.varied}]",  # does not tell right from wrong
        "--output",
    ]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    said = evaluate(whole, *arguments, str(files[0])).out
    by_two = evaluate(whole, *arguments, str(files[1]), ranks=2).out
    assert by_two == said.replace("one.json", "two.json")
    assert files[0].read_bytes() == files[1].read_bytes()
    alone = ["--base", "eval_dataset.num_samples=1"]  # the second rank has no prompt
    assert evaluate(whole, *alone, ranks=2).out == evaluate(whole, *alone).out
    report = json.loads(files[0].read_text())
    assert [*report["groups"]] == ["all", "level=0", "level=1", "level=2", "level=3"]
    for name, group in report["groups"].items():
        rows = report["answers"]["before"]
        rows = [r for r in rows if name in ("all", f"level={r['columns']['level']}")]
        assert group["prompts"] == len(rows) == (8 if name == "all" else 2)
        golds = [row["columns"]["answer"] for row in rows]
        answers = [[row["greedy"], *row["samples"]] for row in rows]
        right, last = (each["before"] for each in group["graders"].values())
        assert [*group["graders"]] == ["right", "last"]  # the one that trains comes first
        assert right["eval/accuracy"] == right["eval/pass@1"] == fmean(gold == 7 for gold in golds)
        numbers = [re.findall(r"-?\d+", each[0]["completion"])[-1] for each in answers]
        hits = [number == str(gold) for number, gold in zip(numbers, golds, strict=True)]
        assert last["eval/accuracy"] == fmean(hits)
        for grader, found in (("right", right), ("last", last)):
            assert found["eval/mean_length"] == fmean(each[0]["tokens"] for each in answers)
            title = re.escape(f"\n{name}: {len(rows)} prompts, {grader} ")
            shown = re.search(rf"{title} +before\n((?:.+\n)+)", said)[1]
            cells = dict(re.findall(r"(\S+@?\d?) +([\d.]+) \[[\d.]+, [\d.]+\]\n", shown))
            assert cells == {
                metric: f"{found[f'eval/{metric}']:.3f}"
                for metric in ("accuracy", "pass@1", "pass@2", "pass@4", "maj@4")
            }
