"""A judge and a reward model in a whole run, whose files do not hold the key."""

import pytest
from judge_server import judge_server
from reward_models import reward_model
from runs import NO_EVALUATION, RECIPE, read, tune

CONFIG = ["--config", "tiny_arithmetic_grpo", *NO_EVALUATION]
KEYS = "grpo_samples=4 max_generated_tokens=12 lr_scheduler=null".split()
ENV = {"JUDGE_API_KEY": "sesame-open-wide", "no_proxy": "127.0.0.1"}


def rewards(url, folder):
    judge = "{_component_: torchtune_grpo.rewards.JudgeReward, name: judge, model: m, tries: 1, "
    judge += f"url: '{url}', cache: marks.db}}"
    model = f"{{_component_: torchtune_grpo.rewards.RewardModel, model_dir: {folder}}}"
    return f"rewards=[{judge}, {model}]"


@pytest.mark.slow
def test_no_file_of_a_run_holds_the_key(tmp_path):
    """Though the server gets it, and replies with it in an error; the model's cost is logged."""
    with judge_server(lambda answers, outside: "401") as server:
        keys = [*KEYS, rewards(server.url, reward_model(tmp_path / "rm")), "output_dir=out"]
        keys += ["batch_size=2", "num_steps=1", "max_reward_failure_share=1.0"]
        done = tune("run", RECIPE, *CONFIG, *keys, cwd=tmp_path, **ENV)
        keys += ["max_reward_failure_share=0.5", "output_dir=ends"]
        ended = tune("run", RECIPE, *CONFIG, *keys, cwd=tmp_path, check=False, **ENV)
        assert {key for _, key, _ in server.requests} == {"Bearer sesame-open-wide"}
    assert read(tmp_path / "out", "step")[0]["rewards/reward_model/tokens"] > 12
    said = done.out + done.err + ended.out + ended.err
    assert "HTTP 401" in said and ended.code == 1
    assert "HTTP 401" in (tmp_path / "ends/error.txt").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if b"sesame" in path.read_bytes()] and "sesame" not in said
