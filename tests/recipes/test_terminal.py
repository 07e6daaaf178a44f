"""Output of a run: a line a step, evaluations, a summary that names the page; nothing else."""

import re

import pytest
from runs import RECIPE, tiny_overrides, tune

from torchtune_grpo.monitor.record import STILL_THE_BASE, read

NUMBER = r"-?\d+\.\d+"
STEP = (
    rf"Step {{}}/2: reward {NUMBER}, accuracy {NUMBER}, informative {NUMBER}, "
    r"[\d.]+[kM]? tok/s, \d\d:\d\d left"
)
EVALUATION = rf"Step {{}}: trained-on accuracy {NUMBER} \[{NUMBER}, {NUMBER}\], pass@1 {NUMBER}, .*"
CELL = rf"{NUMBER} \[{NUMBER}, {NUMBER}\]"
CHANGE = r"[+-]\d\.\d+ \[[+-]\d\.\d+, [+-]\d\.\d+\] p[=<]\d\.\d+"
SCORES = ("accuracy", "pass@1", "pass@2", "maj@2")


def lines_of(text):
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.slow
def test_a_run_prints_only_what_matters(tmp_path):
    """It is a new interpreter, in which libraries warn at import and loggers at every call."""
    config = "llama3_2_1B_lora_grpo"
    overrides = [*tiny_overrides(config, tmp_path), "evaluation.samples=2"]
    done = tune("run", RECIPE, "--config", config, *overrides, cwd=tmp_path, fresh=True)
    out = tmp_path / "out"
    assert not lines_of(done.out)
    expected = [
        r"Groups in which correctness is the same for all are skipped, so that format alone .*\.",
        r"CPU threads: \d+\.",
        r"eval_dataset: dataset has 100% of its prompts, too, which are not held out; give .*",
        EVALUATION.format(0),
        STEP.format(1),
        STEP.format(2),
        EVALUATION.format(2),
        f"Saved {out / 'step_000002'}",
        r"trained-on, 95 % interval\s+step 0\s+step 2\s+change",
        *(rf"{name}\s+{CELL}\s+{CELL}\s+{CHANGE}" for name in SCORES),
        *(rf"{name}\s+{NUMBER}\s+{NUMBER}" for name in ("mean_length", "clipped_ratio")),
        r"Not significant yet: on \d+ trained-on problems, \d+ improved and \d+ got worse\.",
        r"With \d+ problems, changes below 0\.\d\d may be chance\. (Train longer|Evaluate on).*",
        "findings: none",
        rf"{out / 'run.html'}\s+the run's page",
        rf"{out / 'run.jsonl'}\s+its numbers",
        rf"{out / 'completions.jsonl'}\s+what the policy wrote",
        rf"{out / 'step_000002'}\s+the last checkpoint",
        re.escape(STILL_THE_BASE),
    ]
    said = lines_of(done.err)
    assert len(said) == len(expected), done.err
    for line, pattern in zip(said, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    (start,) = read(out, "start")
    assert start["command"].startswith(f"tune run {RECIPE} --config {config} ")
    assert start["versions"]["torchtune"] == "0.6.1"
    assert start["config"]["evaluation"]["samples"] == 2


def test_a_page_that_cannot_be_written_does_not_end_a_run(tmp_path):
    overrides = tiny_overrides("llama3_2_1B_lora_grpo", tmp_path)
    (tmp_path / "out/run.html/in the way").mkdir(parents=True)
    overrides += ["eval_dataset=null", "evaluation.every_n_steps=null", "num_steps=1"]
    done = tune("run", RECIPE, "--config", "llama3_2_1B_lora_grpo", *overrides, cwd=tmp_path)
    assert "The run's page is not written: " in done.err and "step_000001" in done.err
