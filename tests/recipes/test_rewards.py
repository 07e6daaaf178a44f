"""Rewards of a user's own, through the real ``tune`` command."""

import json
import re

import pytest
import yaml
from runs import (
    NO_EVALUATION,
    completions,
    copy_recipe,
    metrics,
    run,
    run_tiny,
    steps_of,
    tiny_overrides,
    tune,
)

from torchtune_grpo.monitor.record import read
from torchtune_grpo.monitor.report import write_page

CONFIG = "llama3_2_1B_lora_grpo"
REWARDS = '''
import asyncio

def judge(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    """As for TRL's trainer, with chat messages."""
    texts = [completion[0]["content"] for completion in completions]
    log_extra("characters", [len(text) for text in texts])
    log_metric("step", trainer_state.global_step)
    return [float(len(ids) + len(text) % 7) for ids, text in zip(completion_ids, texts)]

async def waits(prompts, completions, answer, **kwargs):
    await asyncio.sleep(0.01)
    return [None if index % 2 else 1.0 for index in range(len(answer))]
'''


@pytest.mark.slow
def test_a_file_next_to_the_config(tmp_path):
    """Copied recipe and config are run from another folder, with a reward of each kind."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "my_rewards.py").write_text(REWARDS)
    copy_recipe(CONFIG, mine)
    config = yaml.safe_load((mine / "my_config.yaml").read_text())
    config["rewards"] = [
        {"_component_": "my_rewards.judge", "name": "judge", "format": "chat"},
        {"_component_": "my_rewards.waits", "name": "waits", "weight": 0.1},
    ]
    (mine / "my_config.yaml").write_text(yaml.safe_dump(config))
    command = ["run", "mine/my_grpo.py", "--config", "mine/my_config.yaml"]
    small = ["batch_size=2", "grpo_samples=4", *NO_EVALUATION]
    tune(*command, *tiny_overrides(CONFIG, tmp_path), *small, cwd=tmp_path)
    steps = metrics(tmp_path / "out")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rewards/judge/mean"] > 1 and step["rewards/judge/errors"] == 0
        assert step["rewards/waits/none"] == 0.5 and step["rewards/waits/mean"] == 1.0
        assert all(step[f"time/rewards/{name}"] > 0 for name in ("judge", "waits"))
    assert [step["rewards/judge/step"] for step in steps] == [0, 1]
    record = completions(tmp_path / "out")[0]
    assert record["extra"]["characters"] == len(record["completion"])


MISCHIEF = """
import asyncio, sys, threading
from torchtune_grpo.cli import entry

entry._PATIENCE = 0.5

async def mischief(prompts, completions, **columns):
    wait = threading.Event().wait
    threading.Thread(target=wait, name="left behind", daemon=False).start()
    await asyncio.gather(leave(), leave())

async def leave():
    sys.exit(0)
"""


@pytest.mark.slow
def test_a_reward_neither_ends_the_process_nor_keeps_it_alive(tmp_path):
    """Tasks of its own call sys.exit, which ends their loop, and it leaves a thread."""
    (tmp_path / "my_rewards.py").write_text(MISCHIEF)
    keys = ["rewards.1={_component_: my_rewards.mischief, name: mischief}", *NO_EVALUATION]
    done = run_tiny(CONFIG, tmp_path, *keys, "max_reward_failure_share=1")
    assert "Ends without waiting for threads that a reward may have left: left behind" in done.err
    assert [step["rewards/mischief/errors"] for step in steps_of(tmp_path / "out")] == [1.0] * 2
    done = run_tiny(CONFIG, tmp_path, *keys, "max_reward_failure_share=0", check=False)
    assert done.code == 1 and "SystemExit: 0" in done.err


GATED = """
def right(prompts, completions, trainer_state, number, **columns):
    first = list(range(len(number) // 2)) if trainer_state.global_step == 1 else []
    return [float(row % 2) if row in first else 0.0 for row in range(len(number))]

def length(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("gate", [None, "false"])
def test_a_shaping_reward_trains_only_where_outcomes_differ(tmp_path, gate):
    """Nothing is right in step 1; in step 2 one of two groups has right answers and wrong ones.

    The gate is shut from then on, also in a run that is resumed.
    """
    (tmp_path / "my_rewards.py").write_text(GATED)
    rewards = "{_component_: my_rewards.length, weight: 0.1}, {_component_: my_rewards.right}"
    keys = [f"rewards=[{rewards}]", "deciding_reward=right", "log_groups=9"]
    keys += [f"objective.outcome_gate={gate}"] * (gate is not None)
    keys += [*NO_EVALUATION, "batch_size=2", "grpo_samples=4"]
    done = run_tiny(CONFIG, tmp_path, *keys)
    run_tiny(CONFIG, tmp_path, *keys, "num_steps=3", "resume_from_checkpoint=true")
    trained = {}
    for record in completions(tmp_path / "out"):
        trained.setdefault((record["step"], record["prompt_index"]), []).append(record["advantage"])
    informative = [any(advantages) for advantages in trained.values()]
    steps = [step["frac_informative_groups"] for step in metrics(tmp_path / "out")]
    assert len(informative) == 6 and sum(informative) == 2 * sum(steps)
    assert steps == ([1, 0.5, 0] if gate is None else [1, 1, 1])
    assert ("alone trains none" in done.out + done.err) == (gate is None)
    assert {start["decider"] for start in read(tmp_path / "out", "start")} == {"right"}


@pytest.mark.slow
def test_only_a_deciding_reward_is_called_accuracy_and_can_be_the_gate(tmp_path):
    """Without one, the first reward is reported under its own name, everywhere."""
    (tmp_path / "my_rewards.py").write_text(GATED)
    keys = ["rewards=[{_component_: my_rewards.length}]", "evaluation.samples=2", "num_steps=1"]
    done = run_tiny(CONFIG, tmp_path, *keys, "objective.outcome_gate=true", check=False)
    assert "objective.outcome_gate=True: no reward is known to decide" in done.err
    done = run_tiny(CONFIG, tmp_path, *keys)
    said, out = done.out + done.err, tmp_path / "out"
    assert re.search(r"Step 1/1: reward \d\.\d+, length \d\.\d+, informative", said)
    assert re.search(r"trained-on length: greedy \d.* \[.*\], best of 1 \d.*, best of 2 ", said)
    evaluated = run("-m", "torchtune_grpo", "evaluate", str(out), "--show", "1", cwd=tmp_path).out
    assert "--- after: reward " in evaluated
    for table in (said, evaluated):
        assert re.search(r"\nlength +\d.*\nlength, best of 1 +\d.*\nlength, best of 2 +\d", table)
    card = (out / "step_000001" / "README.md").read_text()
    headline = write_page(out)
    assert headline.startswith("Trained-on mean of length ") and headline in card
    (page,) = re.findall('id="data">(.*?)</script>', (out / "run.html").read_text())
    shown = [each["title"] for each in json.loads(page)["panels"]]
    assert "Trained-on mean of length" in shown and not any("right" in title for title in shown)
    texts = (said, evaluated, card, page.replace("objective.outcome_gate", ""))
    assert not any(re.search("(?i)(?<!eval/)accuracy", text) for text in texts)
