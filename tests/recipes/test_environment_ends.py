"""However a run ends, its environments are closed, and what they have started ends with them."""

import os
import signal
import time
from pathlib import Path

import pytest
from processes import is_alive, wait_until
from runs import NO_EVALUATION, RECIPE, in_background, run, run_ranks, tune

from torchtune_grpo.machine.interrupt import ECHO_SECONDS

QUICK = """
environment._component_=hosted.Logged rewards=[] batch_size=1 grpo_samples=4 num_steps=1
forward_batch_size=4 max_generated_tokens=40 dataset.num_samples=64 lr_scheduler=null output_dir=out
environment.max_turns=2 environment.max_response_tokens=200
""".split()
BAD = """
import threading, time

def reward(completions, **columns):
    threading.Thread(target=time.sleep, args=(99,)).start()
    1 / 0
"""
DEAF = """
import signal, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background

def reward(completions, **columns):
    open("reward", "w").close()
    while True:
        try:
            time.sleep(99)
        except BaseException:
            pass
"""
TESTS = str(Path(__file__).parents[1])
pytestmark = pytest.mark.slow


def settings(folder, **arguments):
    """The command line, and a folder for what environments note."""
    noted = folder / "noted"
    noted.mkdir()
    keys = {"folder": noted, **arguments}
    return [*QUICK, *NO_EVALUATION, *(f"environment.{key}={value}" for key, value in keys.items())]


def check_closed(folder):
    """All environments are closed at once, and nothing is left of them."""
    noted = folder / "noted"
    children = [int(path.name.partition("-")[2]) for path in noted.glob("child-*")]
    closed = [noted / f"closed-{child}" for child in children]
    assert children and wait_until(lambda: all(map(Path.exists, closed)))
    assert wait_until(lambda: not any(map(is_alive, children)))


def train(folder, *more, **options):
    command = ["run", RECIPE, "--config", "tiny_arithmetic_grpo", *more]
    return tune(*command, cwd=folder, check=False, PYTHONPATH=TESTS, **options)


def send_in_a_step(folder, command, *signals, pause=0.0, place="noted/step"):
    """Start a run, and send signals once it has written a file; return its result."""
    with in_background(train, folder, *command) as done:
        assert wait_until((folder / place).exists, seconds=30)
        (process,) = done.processes()
        for number in signals:
            os.kill(process, number)
            time.sleep(pause)
        return done.result()


def test_after_an_error(tmp_path):
    """Also if a thread is left, for which Python would wait."""
    (tmp_path / "bad.py").write_text(BAD)
    reward = "rewards=[{_component_: bad.reward}]"
    done = train(tmp_path, *settings(tmp_path), reward)
    assert done.code == 1 and "division by zero" in done.err
    check_closed(tmp_path)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_after_a_signal_in_a_step(name, tmp_path):
    """Also after one that no process can handle."""
    number = getattr(signal, name)
    command = settings(tmp_path, slowness=0.3)
    done = send_in_a_step(tmp_path, [*command, "num_steps=9"], number)
    assert done.code == (-number if name == "SIGKILL" else 128 + number), done.err
    check_closed(tmp_path)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_after_a_signal_before_the_first_step(name, tmp_path):
    done = train(tmp_path, *settings(tmp_path, end=name))
    assert done.code == -getattr(signal, name), done.err
    assert not (tmp_path / "out" / "run.jsonl").exists()
    check_closed(tmp_path)


def test_after_ctrl_c_twice(tmp_path):
    """The second one ends the run at once, here within a reward that hears of none."""
    (tmp_path / "deaf.py").write_text(DEAF)
    command = [*settings(tmp_path), "rewards=[{_component_: deaf.reward}]"]
    signals = [signal.SIGINT, signal.SIGINT]
    pause = ECHO_SECONDS + 0.3
    done = send_in_a_step(tmp_path, command, *signals, pause=pause, place="reward")
    assert done.code == 128 + signal.SIGINT and "SIGINT: saving" in done.err, done.err
    assert not list(tmp_path.glob("out/step_*"))
    check_closed(tmp_path)


def test_of_a_script_that_closes_nothing(tmp_path):
    keys = settings(tmp_path)
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from torchtune_grpo.config.command_line import load_config\n"
        "from torchtune_grpo.recipes.grpo_full_finetune import GRPOFullFinetuneRecipe\n"
        "cfg = load_config('tiny_arithmetic_grpo', sys.argv[1:])\n"
        "recipe = GRPOFullFinetuneRecipe(cfg)\n"
        "recipe.setup(cfg)\n"
        "recipe.train()\n"
    )
    run(tmp_path / "script.py", *keys, cwd=tmp_path, PYTHONPATH=TESTS)
    check_closed(tmp_path)


def test_at_a_good_end_on_each_rank(tmp_path):
    command = settings(tmp_path)
    run_ranks("--config", "tiny_arithmetic_grpo", *command, ranks=2, cwd=tmp_path, PYTHONPATH=TESTS)
    assert len([*(tmp_path / "noted").glob("child-*")]) == 8
    check_closed(tmp_path)
