"""benchmarks/gpu.py with a tiny model on a CPU."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import gpu
import pytest
from runs import EAGER, run

SCRIPT = Path(gpu.__file__)


@pytest.mark.slow
def test_pieces_run_and_are_written_down(tmp_path):
    pieces = ["decoding", "recipe_lora", "update", "peers", "smollm2"]
    done = run(SCRIPT, "--device", "cpu", "--tiny", "--pieces", *pieces, cwd=tmp_path, **EAGER)
    result = json.loads((tmp_path / "gpu_check" / "results.json").read_text())
    assert list(result["pieces"]) == pieces
    for name, piece in result["pieces"].items():
        errors = [entry["error"] for entry in [piece, *piece["entries"]] if "error" in entry]
        assert not errors, errors
        assert f"{name}: done" in done.out
    decoding = {entry["what"]: entry for entry in result["pieces"]["decoding"]["entries"]}
    assert decoding["log-probs of sampler and trainer"]["mean_gap"] < 1e-4
    assert decoding["8 rows, operators"]["kernels"] > 100
    lora = result["pieces"]["recipe_lora"]["entries"][-1]
    assert len(lora["step_time_s"]) == 3
    assert lora["estimate_gib"] > 0

    for piece in result["pieces"].values():
        for entry in piece["entries"]:
            assert json.dumps(entry) in done.out


@pytest.fixture
def measure(tmp_path, monkeypatch):
    def measure_piece(work, *, seconds=60.0):
        monkeypatch.setitem(gpu.RUN, "update", work)
        args = Namespace(device="cpu", tiny=True, output_dir=tmp_path)
        return gpu.Piece("update", args).measure(seconds)

    return measure_piece


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: None, "$"),
        (lambda: 1 / 0, "exit code 1: .*ZeroDivisionError"),
        (lambda: os.kill(os.getpid(), 9), "exit code -9"),
    ],
)
def test_an_entry_outlives_one_that_fails_and_the_end_of_its_piece(measure, end, said):
    def work(bench):
        bench.measure("broken", lambda: {"figure": 1 / 0})
        bench.measure("whole", lambda: {"figure": 1})
        end()

    result = measure(work)
    _, broken, whole = result["entries"]
    assert broken["error"].endswith("ZeroDivisionError: division by zero")
    assert whole["figure"] == 1
    assert re.match(said, result.get("error", ""))


def test_two_calls_at_one_commit_fill_one_file_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no git

    def pieces_after(name):
        monkeypatch.setitem(gpu.RUN, name, lambda bench: None)
        options = ["--device", "cpu", "--tiny", "--output-dir", str(tmp_path), "--pieces", name]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
        assert gpu.main() == 0
        return list(json.loads((tmp_path / "results.json").read_text())["pieces"])

    assert pieces_after("update") == ["update"]
    assert pieces_after("peers") == ["update", "peers"]
    monkeypatch.setattr(gpu, "commit", lambda: "another")
    assert pieces_after("decoding") == ["decoding"]


@pytest.mark.slow
def test_a_piece_that_hangs_is_ended(measure):
    result = measure(lambda bench: os.read(os.pipe()[0], 1), seconds=2)
    assert result["error"] == "ended after 2 s"
