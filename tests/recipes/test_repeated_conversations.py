"""Runs with an environment repeat themselves to the last bit, whenever its replies come."""

import pytest
from runs import RECIPE, completions, distance, metrics, run_ranks, steps_of, tune, untimed, weights

# Each step takes another time in each run, up to about ten decoding steps.
ENVIRONMENT = """
import os, time


class Slow:
    def reset(self, answer, **row):
        self.answer, self.turns = int(answer), 0

    def step(self, text):
        time.sleep(os.urandom(1)[0] / 255 * SECONDS)
        self.turns += 1
        is_done = self.turns > 1 + (self.answer + len(text)) % 3
        return "again", float(len(text) % 5), is_done
"""
COMMAND = ["--config", "tiny_arithmetic_grpo", "environment=my_env.Slow", "rewards=[]"]
COMMAND += """
environment.max_response_tokens=96 max_generated_tokens=64 sampling.stop_strings=["="]
batch_size=4 grpo_samples=6 saving.every_n_steps=1 lr_scheduler=null dtype=bf16 log_groups=9
eval_dataset.num_samples=6 evaluation.every_n_steps=1 evaluation.samples=1
""".split()
ONE, TWO = ("whole", "parts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, []), (1, ["rollout.max_rows=7"]), (2, ["batch_size=2"])],
    ids=["one rank", "few rows at once", "two ranks"],
)
def test_a_run_and_one_that_is_resumed_are_the_same(ranks, options, tmp_path):
    """In bfloat16, where another shape of a batch rounds so differently that texts differ."""
    (tmp_path / "my_env.py").write_text(ENVIRONMENT.replace("SECONDS", "0.1"))

    def train(folder, *more):
        command = [*COMMAND, *options, f"output_dir={folder}", *more]
        if ranks == 1:
            return tune("run", RECIPE, *command, cwd=tmp_path)
        return run_ranks(*command, ranks=ranks, cwd=tmp_path)

    train(ONE, "num_steps=2")
    train(TWO, "num_steps=1")
    train(TWO, "num_steps=2", "resume_from_checkpoint=True")
    one, two = tmp_path / ONE, tmp_path / TWO
    check_record(one)
    assert completions(one) == completions(two)
    assert untimed(one) == untimed(two)
    assert distance(weights(one / "step_000002"), weights(two / "step_000002")) == 0


def check_record(folder):
    """Its metrics, those of its evaluations, its conversations and its page."""
    steps = steps_of(folder)
    assert all(step["environment/turns"] > 1.2 for step in steps)
    shares = [value for name, value in steps[0].items() if name.startswith("environment/ended/")]
    assert len(shares) == 7 and sum(shares) == pytest.approx(1)
    assert "rewards/Slow/mean" in steps[0]
    assert any("eval/Slow" in event or "eval/accuracy" in event for event in metrics(folder))
    roles = [[turn["role"] for turn in row["messages"][:3]] for row in completions(folder)]
    assert ["assistant", "user", "assistant"] in roles
    assert "[user] " in (folder / "run.html").read_text()
