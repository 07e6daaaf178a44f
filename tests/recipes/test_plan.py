"""`torchtune-grpo plan` and `GRPO.plan`: what they say before a run, which they do not change."""

import fcntl
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from processes import on_two_ranks
from runs import NO_EVALUATION, RECIPE, metrics, run, tune, weights

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.evaluation.statistics import Score
from torchtune_grpo.monitor.findings import History
from torchtune_grpo.plan import (
    Plan,
    _goes_on,
    _memory,
    _seconds,
    _shares_of_spread,
    judge,
    lines,
    make_plan,
)
from torchtune_grpo.rewards import Reward, RewardSet

CONFIG = "tiny_arithmetic_grpo"
QUICK = ["batch_size=4", "dataset.num_samples=64", "eval_dataset.num_samples=8", "num_steps=30"]


def plan(folder, *keys):
    """The exit code, what it printed, and plan.json."""
    command = ["-m", "torchtune_grpo", "plan", "--config", CONFIG, "output_dir=out"]
    done = run(*command, *QUICK, *keys, cwd=folder, check=False)
    file = folder / "out" / "plan.json"
    return done, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.slow
def test_a_run_that_learns(tmp_path):
    """Nothing is left of it but its file; an earlier run in the folder stays as it is."""
    keys = [*QUICK, "output_dir=out", "num_steps=1", "grpo_samples=2", *NO_EVALUATION]
    tune("run", RECIPE, "--config", CONFIG, *keys, cwd=tmp_path)
    out = tmp_path / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert metrics(out)
    done, found = plan(tmp_path)
    assert done.code == 0 and "Verdict: learns." in done.out
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert after.pop(out / "plan.json") and after == before
    assert found["prompts"] == 16 and 0 < found["moved"] < 0.5
    low, high = found["informative"][1:]
    assert 0.5 < low < high <= 1 and found["cut_off"][0] == 0
    seconds = found["time"]
    assert seconds["step"] == pytest.approx(
        sum(seconds[n] for n in ("rollout", "reward", "update"))
    )
    assert sum(found["spread"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("key", "code", "said", "change"),
    [
        ("optimizer.lr=0.05", 4, "moves the policy by", "optimizer.lr=0.001667"),
        ("optimizer.lr=5e-8", 4, "hardly move the policy", "optimizer.lr=1e-05"),
        (
            "rewards.0._component_=mine.off rewards.1.weight=0",
            4,
            "such as 7 where answer is ",
            None,
        ),
        (
            "rewards.0._component_=mine.loud max_generated_tokens=2 "
            "objective.mask_truncated_completions=true",
            3,
            "No token was trained on",
            "objective.mask_truncated_completions=False",
        ),
        ("temperature=0.01", 3, "all texts are the same", "temperature=1"),
        ("rewards.0._component_=mine.none", 4, "correctness was None for every answer", None),
        ("rewards.1._component_=mine.loud", 3, "of the rewards' spread", "rewards.1.weight=0.01"),
        ("rewards.0._component_=mine.solved rewards.1.weight=0", 4, "Take harder prompts", None),
    ],
)
def test_what_is_wrong_with_a_run(tmp_path, key, code, said, change):
    (tmp_path / "mine.py").write_text(
        "def none(completions, **c): return [None] * len(completions)\n"
        "def off(completions, answer, **c): return [0.0] * len(completions)\n"
        "off.decides, off.answer_of = True, lambda text: '7'\n"
        "def solved(completions, **c): return [1.0] * len(completions)\n"
        "def loud(completions, **c): return [99.0 * len(text) for text in completions]\n"
    )
    done, found = plan(tmp_path, *key.split(), "deciding_reward=correctness")
    assert done.code == code and said in done.out, done.out + done.err
    assert "by nan" not in done.out
    assert change is None or found["changes"] == [change]


def test_an_environment_has_two_limits_and_its_own_reward():
    played = ["environment=my.Game", "environment.max_response_tokens=96", "rewards=[]"]
    history = History(read_config(load_config(CONFIG, played)), {"Game": None}, "Game")
    same = {"rewards/Game/mean": 0.3, "rewards/Game/std": 0.0, "rewards/Game/none": 0.0}
    history.add({"kind": "step", "step": 0, "frac_informative_groups": 1.0, **same})
    score, time = Score(0.3, 0.3, 0.3), ("rollout", "reward", "update", "step", "run", "evaluation")
    seconds, memory = dict.fromkeys(time, 1.0), {"peak": 1, "total": 9}
    plan = Plan(4, 2, 48, 96, "Game", score, score, score, {}, {}, None, seconds, memory)
    judge(plan, history)
    assert plan.verdict == "will not learn" and "Game was 0.3 for every answer" in plan.reasons[0]
    said = "\n".join(lines(plan))
    assert "at 48 sampled or 96 tokens" in said and "mean Game        0.300 [" in said


@pytest.mark.parametrize(
    ("correctness", "form", "verdict"),
    [
        ({"errors": 0.02}, {}, "doubtful"),
        ({}, {"errors": 0.02}, "doubtful"),
        ({}, {"mean": 0.0, "std": 0.0}, "learns"),
        ({}, {"none": 1.0}, "doubtful"),
        ({"none": 1.0}, {}, "will not learn"),
        ({"none": 1.0}, {"mean": 0.0, "std": 0.0}, "will not learn"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_reward_that_fails_or_says_nothing(order, correctness, form, verdict):
    """As docs/plan.md has it, whichever of the two comes first."""
    cfg = load_config(CONFIG)
    cfg.rewards = [*cfg.rewards][::order]
    event = {"kind": "step", "step": 0, "frac_informative_groups": 1.0}
    for name, own in (("correctness", correctness), ("format", form)):
        known = {"errors": 0.0, "none": 0.0, "mean": 0.5, "std": 0.5, **own}
        drop = ("mean", "std") if known["none"] == 1 else ()
        event |= {f"rewards/{name}/{what}": x for what, x in known.items() if what not in drop}
    names = [reward.name for reward in cfg.rewards]
    history = History(read_config(cfg), dict.fromkeys(names), "correctness")
    history.add(event)
    score, plan = Score(0.5, 0.4, 0.6), Plan(*[None] * 14)
    plan.pass_rate = plan.informative = plan.cut_off = score
    plan.spread, plan.memory = {}, {"peak": 1, "total": 9}
    judge(plan, history)
    assert plan.verdict == verdict, plan.reasons


def test_a_reward_that_is_none_or_has_failed_is_no_spread():
    def scores(completions, **columns):
        return [None, 5.0, ValueError("mine"), 5.0]

    def right(completions, **columns):
        return [0.0, 1.0, 0.0, 1.0]

    rewards = RewardSet([Reward("right", right), Reward("rare", scores)], max_failure_share=1)
    scored = rewards(prompts=["p"] * 4, completions=["c"] * 4, columns={}, group_size=2)
    assert _shares_of_spread(scored, group_size=2) == {"right": 1.0, "rare": 0.0}


@pytest.mark.parametrize(
    ("keys", "questions", "seconds"),
    [
        ([], 8, 100.0),  # no fewer steps than 64 answers of the same length
        ([], 256, 400.0),
        (["evaluation.samples=4"], 8, 200.0),
        (["rollout.max_rows=16"], 8, 25.0),
    ],
)
def test_a_few_answers_wait_for_their_longest(keys, questions, seconds):
    """All responses are of the same length, and a rollout of 64 of them takes 100 s."""
    keys = ["batch_size=8", "grpo_samples=8", "evaluation.samples=0", *keys]
    cfg = read_config(load_config(CONFIG, keys))
    recipe = SimpleNamespace(cfg=cfg, run=SimpleNamespace(eval_dataset=range(questions)))
    times = [{"time/rollout": 100.0, "time/reward": 0.0}] * 2
    found = _seconds(recipe, times, 1.0, torch.full((128,), 50))
    assert found["evaluation"] == pytest.approx(seconds)


def test_a_second_plan_is_refused_and_leaves_the_first_ones_folder(tmp_path):
    scratch = tmp_path / ".plan"
    scratch.mkdir()
    with (scratch / ".lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is running in it"):
            make_plan(load_config(CONFIG, [f"output_dir={tmp_path}"]))
    assert (scratch / ".lock").exists()


@pytest.mark.slow
def test_training_is_what_it_would_have_been(tmp_path):
    """To the last bit, from Python."""
    script = (
        "import sys\n"
        "from torchtune_grpo import GRPO\n"
        "run = GRPO(config='tiny_arithmetic_grpo', output_dir=sys.argv[1], num_steps=2,\n"
        "           batch_size=4, eval_dataset=None, model_dir='model',\n"
        "           dataset={'num_samples': 64},\n"
        "           grpo_samples=4, max_generated_tokens=32)\n"
        "if sys.argv[1] == 'planned':\n"
        "    assert run.plan()['moved'] > 0\n"
        "run.train()\n"
        "try:\n"
        "    run.plan()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    (tmp_path / "script.py").write_text(script)
    for name in ("planned", "alone"):
        assert "Call plan() before train()" in run("script.py", name, cwd=tmp_path).out
    planned, alone = (weights(tmp_path / name / "step_000002") for name in ("planned", "alone"))
    assert planned.keys() == alone.keys()
    assert all(bool((planned[name] == alone[name]).all()) for name in alone)


def test_memory_is_also_that_of_processes_that_rewards_have_started():
    run, held = (
        SimpleNamespace(device=torch.device("cpu")),
        "x = b'x' * 300_000_000; print(1); input()",
    )
    before, pipes = _memory(run)["peak"], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-uc", held], **pipes) as child:
        child.stdout.readline()
        assert 3.0e8 < _memory(run)["peak"] - before < 3.5e8
        child.communicate(b"\n")


def test_ranks_agree_on_the_rounds_whatever_their_clocks_say(tmp_path):
    """The second one has spent its time; alone in the next part, it would wait for ever."""

    def goes_on(rank: int) -> bool:
        return _goes_on(1, start=time.perf_counter() - 100 * rank)

    assert on_two_ranks(goes_on, folder=tmp_path) == [True, True]
