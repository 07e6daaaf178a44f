"""A full disk ends a command in one line that names the file, a closed pipe in none."""

import pytest
from runs import RECIPE, run, tune

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
