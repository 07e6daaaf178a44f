"""The embedded default: no download, no files of its own, one command."""

import pytest
from runs import DISTRIBUTED, RECIPE, metrics, run, tune

from torchtune_grpo.monitor.record import read

CONFIG = "tiny_arithmetic_grpo"
QUICK = ["num_steps=2", "eval_dataset.num_samples=8", "batch_size=4"]
QLORA = ["model=torchtune_grpo.models.lora_hf_model", "model.quantize_base=True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"), [(RECIPE, []), (DISTRIBUTED, QLORA)], ids=["full", "qlora"]
)
def test_runs_from_an_empty_folder(tmp_path, recipe, more):
    """It does under either name; the model comes with the package."""
    tune("run", recipe, "--config", CONFIG, *QUICK, "forward_batch_size=64", *more, cwd=tmp_path)
    output = tmp_path / CONFIG
    records = metrics(output)
    assert [r["step"] for r in records if "reward" in r] == [1, 2]
    assert [r["step"] for r in records if "eval/pass@1" in r] == [0, 2]
    assert not read(output, "finding")  # two steps are too few to find anything
    assert (output / "step_000002" / "training_state.pt").is_file()
    assert (output / "step_000002" / "adapter").exists() == bool(more)
    if not more:
        check_what_shows_it(output, cwd=tmp_path)


def check_what_shows_it(output, cwd):
    """Assert that the run has its page, and that two problems are answered before and after."""
    page = output / "run.html"
    assert page.stat().st_size > 1_000_000
    page.unlink()
    report = run("-m", "torchtune_grpo", "report", output, cwd=cwd).out
    assert report.startswith("Held-out accuracy") and report.endswith(f"{page}\n")
    assert " held-out problems, " in page.read_text()
    shown = run("-m", "torchtune_grpo", "evaluate", output, "--show", "2", cwd=cwd).out
    assert shown.count("=== What is") == 2
    assert shown.count("--- before: wrong") == shown.count("--- after: right") == 2
    assert "tiny_llama" in shown and "step_000002" in shown
