"""A run whose answers are forced at the limit, through the real commands."""

import json
import shutil

import pytest
from runs import RECIPE, completions, distance, run, steps_of, tune, untimed, weights

TEXT = "</think>\n<answer>"
COMMAND = ["run", RECIPE, "--config", "tiny_arithmetic_grpo", "output_dir=out", "num_steps=2"]
COMMAND += """
batch_size=4 grpo_samples=4 max_generated_tokens=7 eval_dataset.num_samples=4 log_groups=9
lr_scheduler=null saving.every_n_steps=1 evaluation.every_n_steps=null evaluation.samples=1
""".split()
FORCED = 'sampling.forced_answer={text: "</think>\\n<answer>", max_tokens: 20}'


@pytest.mark.slow
def test_a_run_forces_answers_in_training_evaluation_and_samples_and_resumes(tmp_path):
    tune(*COMMAND, FORCED, cwd=tmp_path)
    out, last = tmp_path / "out", tmp_path / "out/step_000002"
    steps, rows = steps_of(out), completions(out)
    for step in steps:
        of_step = [row for row in rows if row["step"] == step["step"]]
        forced = [TEXT in row["completion"] for row in of_step]
        assert 0 < sum(forced) / len(forced) == step["rollout/forced_answers"]
        cut_off = sum(row["ended"] == "length" for row in of_step)
        assert cut_off / len(of_step) == step["completions/clipped_ratio"] < 1
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert distance(weights(out / "step_000001"), weights(last)) > 1e-4

    found = tmp_path / "found.json"
    run("-m", "torchtune_grpo", "evaluate", "out", "--output", found, cwd=tmp_path)
    assert json.dumps(TEXT)[1:-1] in found.read_text()
    shown = run("-m", "torchtune_grpo", "sample", "out", "--num-prompts", "2", cwd=tmp_path).out
    assert TEXT in shown
    refused = tune(*COMMAND, FORCED.replace("20", "5"), cwd=tmp_path, check=False)
    assert refused.code and "forced_answer.max_tokens=5: its text has 5 tokens" in refused.err

    was, metrics = weights(last), untimed(out)
    shutil.rmtree(last)
    tune(*COMMAND, FORCED, "resume_from_checkpoint=True", cwd=tmp_path)
    assert distance(was, weights(last)) == 0 and untimed(out) == metrics
