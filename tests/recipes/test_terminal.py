"""Output of a run: a line a step, evaluations, a summary that names the page; nothing else.

A full disk ends a command in one line that names the file, a closed pipe in none.
"""

import re

import pytest
from runs import RECIPE, run, tiny_overrides, tune

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
        r"With \d+ problems, changes below 0\.\d\d may be chance\. Evaluate on .*",
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


INTO = """
import os, resource, runpy, sys

where, *words = sys.argv[1:]
if where == "closed":  # as by `| head`, which has read enough
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
elif where == "full":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
else:  # bytes of a file
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(where), int(where)))
sys.stdout = open(1, "w", closefd=False)  # with a buffer, as a file or a pipe has
sys.argv = ["torchtune-grpo", *words]
runpy.run_module("torchtune_grpo", run_name="__main__", alter_sys=True)
"""
REMEDY = "Free some space, check permissions, or choose another place."


@pytest.fixture
def into(tmp_path):
    """Run a command whose output, or whose files, find no room."""
    (tmp_path / "into.py").write_text(INTO)

    def call(where, *words):
        done = run("into.py", where, *words, cwd=tmp_path, check=False)
        assert done.code == 1 and "Traceback" not in done.err and "ignored" not in done.err
        return [line for line in done.err.splitlines() if line.startswith("Error")]

    return call


@pytest.mark.parametrize("words", ["config", "config tiny_arithmetic_grpo", "--help", "--version"])
def test_output_that_nobody_takes(into, words):
    """The first command prints more than a buffer holds."""
    assert into("closed", *words.split()) == []
    (line,) = into("full", *words.split())
    assert line.startswith("Error: standard output: could not be written: No space left on device")


@pytest.mark.slow
def test_a_file_without_room_is_named_and_what_there_was_is_kept(tmp_path, into):
    size = "num_steps=1 batch_size=4 grpo_samples=4 output_dir=out eval_dataset.num_samples=24"
    tune("run", RECIPE, "--config", "tiny_arithmetic_grpo", *size.split(), cwd=tmp_path)
    evaluate = ["evaluate", "out", "--samples", "0", "--output", "report.json"]
    page = (tmp_path / "out/run.html").read_bytes()
    for file, words in {
        ".report.json.before": evaluate,
        "scores.jsonl": ["score", "out", "--output", "scores.jsonl"],
        "out/run.html": ["report", "out"],
    }.items():
        (line,) = into("3000", *words)
        assert line == f"Error: {file}: could not be written: File too large. {REMEDY}"
    assert (tmp_path / "out/run.html").read_bytes() == page
    kept = {path.name for path in tmp_path.iterdir()} - {"into.py", "out"}
    assert kept == {".report.json.before"}  # answers, from which the next one goes on
    said = run("-m", "torchtune_grpo", *evaluate, cwd=tmp_path).out
    assert said.endswith("Written to report.json\n")
    assert not (tmp_path / ".report.json.before").exists()
