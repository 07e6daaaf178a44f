"""Prompts that rest in whole runs: the same on any number of ranks, and after a resume."""

import json
import shutil

import pytest
from runs import NO_EVALUATION, RECIPE, prompts, read, run_ranks, tune

REWARD = """
def known(prompts, completions, answer, **columns):
    return [float(a) if a in "01" else i % 2 for i, a in enumerate(answer)]

known.decides = True
"""
KEYS = """
grpo_samples=2 max_generated_tokens=4 lr_scheduler=null saving.every_n_steps=1
dataset._component_=torchtune_grpo.data.RLDataset ~dataset.levels dataset.source=rows.json
sampler._component_=torchtune_grpo.data.ShuffledSampler sampler.rest=1 rewards=[my_rewards.known]
""".split()


@pytest.mark.slow
def test_prompts_rest_alike_on_two_ranks_and_after_a_resume(tmp_path):
    """Of 8 prompts two are never solved and two always, so that passes take 2, 1, 2 and 1 steps."""
    (tmp_path / "my_rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{n}?", "answer": "01??"[n % 4]} for n in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config, out = ["--config", "tiny_arithmetic_grpo", *KEYS, *NO_EVALUATION], tmp_path / "out"
    one = [*config, "output_dir=out", "batch_size=4", "num_steps=6"]
    tune("run", RECIPE, *one, cwd=tmp_path)
    drawn = [each["prompt_index"] for each in prompts(out)]
    for whole in (drawn[:2], drawn[3:5]):
        assert sorted(sum(whole, [])) == [*range(8)]
    assert {row % 4 for row in drawn[2] + drawn[5]} == {2, 3}
    resting = [step["sampler/resting"] for step in read(out, "step")]
    assert resting[0] == 0 and resting[2] == 0.5  # of the prompts before the step
    assert "resting" in (out / "run.html").read_text()
    for step in (2, 3, 4, 5, 6):
        shutil.rmtree(out / f"step_{step:06d}")
    tune("run", RECIPE, *one, "resume_from_checkpoint=true", cwd=tmp_path)
    assert [each["prompt_index"] for each in prompts(out)] == drawn
    two = [*config, "output_dir=two", "batch_size=2", "num_steps=6"]
    run_ranks(*two, ranks=2, cwd=tmp_path)
    assert [each["prompt_index"] for each in prompts(tmp_path / "two")] == drawn
