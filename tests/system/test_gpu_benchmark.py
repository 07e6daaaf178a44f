"""benchmarks/gpu.py with a tiny model on a CPU."""

import json
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
