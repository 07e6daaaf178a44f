"""A judge and a reward model in whole runs: their cost, two ranks, a resume, and the key."""

import shutil
from itertools import count

import pytest
from judge_server import judge_server
from reward_models import reward_model
from runs import NO_EVALUATION, RECIPE, read, run_ranks, tune

CONFIG = ["--config", "tiny_arithmetic_grpo", *NO_EVALUATION]
KEYS = "grpo_samples=4 max_generated_tokens=12 lr_scheduler=null saving.every_n_steps=1".split()
ENV = {"JUDGE_API_KEY": "sesame-open-wide", "no_proxy": "127.0.0.1"}


def rewards(url, folder):
    judge = "{_component_: torchtune_grpo.rewards.JudgeReward, name: judge, model: m, tries: 1, "
    judge += f"url: '{url}', cache: marks.db, group: true}}"
    model = f"{{_component_: torchtune_grpo.rewards.RewardModel, model_dir: {folder}}}"
    return f"rewards=[{judge}, {model}]"


def steps(folder):
    """What each step says of its prompts and its rewards, without what a judge was asked."""
    cost = ("rewards/judge/requests", "rewards/judge/tokens")
    return [
        {n: v for n, v in each.items() if n.startswith(("prompts", "rewards/")) and n not in cost}
        for each in read(folder, "step")
    ]


@pytest.mark.slow
def test_marks_are_the_same_after_a_resume_and_on_two_ranks(tmp_path):
    """Though this judge gives an answer another mark each time, and rank 1 may come first."""
    marks = count(1)

    def decide(answers, outside):
        return ",".join(str(next(marks) % 11) for _ in answers)

    with judge_server(decide) as server:
        keys = [*KEYS, rewards(server.url, reward_model(tmp_path / "rm"))]
        out = tmp_path / "out"
        one = [*CONFIG, *keys, f"output_dir={out}", "batch_size=4", "num_steps=2"]
        tune("run", RECIPE, *one, cwd=tmp_path, **ENV)
        first, last = read(out, "step")
        assert 0 < first["rewards/judge/requests"] <= 1 / 4 and first["rewards/judge/tokens"] > 0
        assert first["rewards/reward_model/tokens"] > 12 and first["rewards/judge/std"] > 0
        whole, asked = steps(out), len(server.requests)
        shutil.rmtree(out / "step_000002")  # as if killed in the update of step 2
        tune("run", RECIPE, *one, "resume_from_checkpoint=true", cwd=tmp_path, **ENV)
        assert steps(out) == whole and len(server.requests) == asked
        two = [*CONFIG, *keys, "output_dir=two", "batch_size=2", "num_steps=1"]
        run_ranks(*two, ranks=2, cwd=tmp_path, **ENV)
        (alike,) = steps(tmp_path / "two")
        assert alike["prompts"]["prompt_index"] == whole[0]["prompts"]["prompt_index"]
        assert alike["rewards/judge/mean"] == whole[0]["rewards/judge/mean"]
        assert len(server.requests) == asked


@pytest.mark.slow
def test_no_file_of_a_run_holds_the_key(tmp_path):
    """Though the server gets it, and replies with it in an error."""
    with judge_server(lambda answers, outside: "401") as server:
        keys = [*KEYS, rewards(server.url, reward_model(tmp_path / "rm")), "output_dir=out"]
        keys += ["batch_size=2", "num_steps=1", "max_reward_failure_share=1.0"]
        done = tune("run", RECIPE, *CONFIG, *keys, cwd=tmp_path, **ENV)
        keys += ["max_reward_failure_share=0.5", "output_dir=ends"]
        ended = tune("run", RECIPE, *CONFIG, *keys, cwd=tmp_path, check=False, **ENV)
        assert {key for _, key, _ in server.requests} == {"Bearer sesame-open-wide"}
    said = done.out + done.err + ended.out + ended.err
    assert (
        "HTTP 401" in said
        and ended.code == 1
        and "HTTP 401" in (tmp_path / "ends/error.txt").read_text()
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if b"sesame" in path.read_bytes()] and "sesame" not in said
