"""`torchtune-grpo plan` and `GRPO.plan`: what they say before a run, which they do not change."""

import json
import math

import numpy as np
import pytest
from runs import metrics, run, tune, weights

from torchtune_grpo.plan import share_ranges, teaching_shares

CONFIG = "tiny_arithmetic_grpo"
QUICK = ["batch_size=4", "dataset.num_samples=64", "eval_dataset.num_samples=8", "num_steps=30"]


def plan(folder, *keys):
    """The exit code, what it printed, and plan.json."""
    command = ["-m", "torchtune_grpo", "plan", "--config", CONFIG, "output_dir=out"]
    done = run(*command, *QUICK, *keys, cwd=folder, check=False)
    file = folder / "out" / "plan.json"
    return done, json.loads(file.read_text()) if file.exists() else None


def test_a_run_that_learns(tmp_path):
    """Nothing is left of it but its file."""
    done, found = plan(tmp_path)
    assert done.code == 0 and "Verdict: learns." in done.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]
    assert found["prompts"] == 16 and found["pass_rate_after"] > found["pass_rate_then"]
    low, high = found["informative"]["16"][1:]
    assert 0.5 < low < high <= 1 and found["cut_off"][0] == 0
    sizes = [found["informative"][size][0] for size in ("4", "8", "16")]
    assert sizes == sorted(sizes)
    seconds = found["time"]
    assert seconds["step"] == pytest.approx(
        sum(seconds[n] for n in ("rollout", "reward", "update"))
    )
    assert sum(r["share_of_spread"] for r in found["rewards"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("key", "code", "said", "change"),
    [
        (
            "max_generated_tokens=4",
            2,
            "100% of the responses are cut off",
            "max_generated_tokens=16",
        ),
        ("optimizer.lr=0.05", 2, "moves the policy by", "optimizer.lr=0.002"),
        ("optimizer.lr=5e-8", 2, "hardly move the policy", "optimizer.lr=1e-05"),
        ("rewards.0._component_=mine.none", 2, "returned None for all responses", None),
        ("rewards.1._component_=mine.loud", 1, "of the rewards' spread", "rewards.1.weight=0.01"),
        ("rewards.1._component_=mine.same", 0, "is 3 for all responses", None),
        ("rewards.0._component_=mine.solved rewards.1.weight=0", 2, "take harder prompts", None),
    ],
)
def test_what_is_wrong_with_a_run(tmp_path, key, code, said, change):
    (tmp_path / "mine.py").write_text(
        "def none(completions, **c): return [None] * len(completions)\n"
        "def same(completions, **c): return [3.0] * len(completions)\n"
        "def solved(completions, **c): return [1.0] * len(completions)\n"
        "def loud(completions, **c): return [99.0 * len(text) for text in completions]\n"
    )
    done, found = plan(tmp_path, *key.split(), "evaluation.reward=correctness")
    assert done.code == code and said in done.out, done.out + done.err
    assert change is None or found["changes"] == [change]


def test_training_is_what_it_would_have_been(tmp_path):
    """To the last bit, from Python."""
    script = (
        "import sys\n"
        "from torchtune_grpo import GRPO\n"
        "run = GRPO(config='tiny_arithmetic_grpo', output_dir=sys.argv[1], num_steps=2,\n"
        "           batch_size=4, eval_data=None, model_dir='model')\n"
        "if sys.argv[1] == 'planned':\n"
        "    assert run.plan()['verdict'] == 'learns'\n"
        "run.train()\n"
        "try:\n"
        "    run.plan()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    (tmp_path / "script.py").write_text(script)
    for name in ("planned", "alone"):
        assert "plan() comes first" in run("script.py", name, cwd=tmp_path).out
    planned, alone = (weights(tmp_path / name / "step_000002") for name in ("planned", "alone"))
    assert planned.keys() == alone.keys()
    assert all(bool((planned[name] == alone[name]).all()) for name in alone)


def test_an_earlier_run_stays_as_it_is(tmp_path):
    keys = [*QUICK, "output_dir=out", "num_steps=1"]
    tune("run", "grpo_full_finetune_single_device", "--config", CONFIG, *keys, cwd=tmp_path)
    before = metrics(tmp_path / "out")
    plan(tmp_path)
    assert metrics(tmp_path / "out") == before and not (tmp_path / "out/previous_runs").exists()


def test_shares_for_other_groups():
    """By all subsets; beyond, near what many more samples of the same pass rates say."""
    assert teaching_shares(np.array([[1.0, 0, 0, 0]]), 2) == pytest.approx(1 / 2)
    assert teaching_shares(np.array([[0.0, 0.5, 1.0]]), 4) is None
    draw = np.random.default_rng(0)
    rates = draw.beta(0.3, 1.2, size=400)
    samples = (draw.random((400, 8)) < rates[:, None]).astype(float)
    true = np.mean(1 - rates**32 - (1 - rates) ** 32)
    found = teaching_shares(samples, 32)
    assert math.isclose(found.mean(), true, abs_tol=0.05)
    few = teaching_shares(samples, 8).mean()
    assert few < true - 0.1  # so that it could fail


@pytest.mark.parametrize("speed", [0.0, 0.3, -0.3])
def test_shares_of_the_first_steps(speed):
    """Their ranges hold what policies do that learn as fast as the first step, slower or not."""
    draw = np.random.default_rng(0)
    logits = draw.normal(-1, 1, size=4000)

    def rates(moved):
        return 1 / (1 + np.exp(-logits - moved))

    def informative(moved):
        return np.mean(1 - rates(moved) ** 8 - (1 - rates(moved)) ** 8)

    now = informative(0.0)
    numbers = {"informative": {"8": [now, now - 0.01, now + 0.01]}, "cut_off": [0.3, 0.28, 0.32]}
    numbers |= {"pass_rate_then": rates(0).mean(), "pass_rate_after": rates(speed).mean()}
    numbers |= {"cut_off_then": 0.3, "cut_off_after": 0.3}
    samples = draw.binomial(8, rates(0.0)) / 8
    found = share_ranges(numbers, samples, size=8, samples=32000)
    low, high = found["informative_soon"]
    for part in (0, 0.5, 1):
        truth = np.mean([informative(step * part * speed) for step in range(10)])
        assert low - 0.01 < truth < high + 0.01
    assert high - low < 0.04 + abs(speed)  # or anything would be in it
    assert found["cut_off_soon"] == pytest.approx([0.28, 0.32], abs=1e-3)
