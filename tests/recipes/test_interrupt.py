"""Real signals to real runs at chosen moments, and resumes.

test_environment_ends.py has signals before the first step, and a second Ctrl-C.
"""

import os
import signal
import time

import pytest
import runs
from kills import outcome
from processes import children, is_alive, wait_until
from runs import DISTRIBUTED, NO_EVALUATION, RECIPE, in_background, metrics, tune

CONFIG = "tiny_arithmetic_grpo"
QUICK = """
num_steps=5 ppo_epochs=2 grpo_samples=4 forward_batch_size=null
max_generated_tokens=8 dataset.num_samples=64 eval_dataset.num_samples=6 evaluation.samples=0
evaluation.every_n_steps=2 output_dir=out model=torchtune_grpo.models.lora_hf_model
num_minibatches=2 sampler._component_=moments.Sampler
model.lora_dropout=0.5 loss._component_=moments.Loss
""".split()
QUICK.append("rewards=[{_component_: moments.reward}, {_component_: moments.judge}]")
ONE, TWO = ["batch_size=4"], ["batch_size=2", "distributed.sharding=always"]
RESUME = "resume_from_checkpoint=True"

# MOMENT=place:n:signal[:rank] sends a signal when the place is passed for the n-th time.
MOMENTS = """
import asyncio, os, random, signal, sys, threading, time
from collections import Counter

import numpy as np
import torch
from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.rollout.native import NativeEngine

passed = Counter()
PLACE, COUNT, SIGNAL, RANK = (os.environ.get("MOMENT", "nowhere:0:0") + ":0").split(":")[:4]
HERE = os.environ.get("RANK", "0")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the tests run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

def is_at(place):
    passed[place] += 1
    return PLACE == place and passed[place] == int(COUNT)

def send(after=0.0):
    threading.Timer(after, os.kill, (os.getpid(), getattr(signal, SIGNAL))).start()

def at(place):
    if is_at(place) and HERE == RANK:
        os.kill(os.getpid(), getattr(signal, SIGNAL))

class Sampler(ShuffledSampler):  # as a user's may be
    def __init__(self, dataset, **given):
        super().__init__(dataset, **given)
        self.seen = np.zeros(len(dataset))

    def learn(self, rows, pass_rates):
        super().learn(rows, pass_rates)
        self.seen[rows] += 1
        self.mean = np.mean(pass_rates)

def generate(engine, request, generate=NativeEngine.generate):
    at("rollout")
    return generate(engine, request)

NativeEngine.generate = generate

class Loss(GRPOLoss):
    def __call__(self, **inputs):
        at("update")
        return super().__call__(**inputs)

def reward(prompts, completions, **columns):
    # The three generators move on.
    noise = torch.rand(len(completions)).numpy() + np.random.rand() + random.random()
    if is_at("hang"):
        send(after=0.5)
        time.sleep(999)
    return [len(set(c)) + x for c, x in zip(completions, noise.tolist())]

async def judge(prompts, completions, **columns):
    if is_at("thread"):  # for whose end asyncio and Python would wait
        send(after=0.5)
        await asyncio.to_thread(time.sleep, 99)
    return [0.0] * len(completions)

def audit(event, arguments):
    if event == "os.rename" and str(arguments[1]).rpartition("/")[2].startswith("step_"):
        at("save")

sys.addaudithook(audit)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "moments.py").write_text(MOMENTS)
    return tmp_path


def run(folder, *more, moment="nowhere:0:0", ranks=0, check=False):
    settings = {"cwd": folder, "check": check, "PYTHONPATH": str(folder), "MOMENT": moment}
    if ranks:
        return runs.run_ranks("--config", CONFIG, *QUICK, *TWO, *more, ranks=ranks, **settings)
    return tune("run", RECIPE, "--config", CONFIG, *QUICK, *ONE, *more, **settings)


def said(done):
    assert "Traceback" not in done.err and "Exception ignored" not in done.err, done.err
    return done.err.strip().splitlines()[-1]


def steps(out):
    return sorted(int(path.name.removeprefix("step_")) for path in out.glob("step_*"))


def check_same(out, whole):
    """Compare weights, optimizer, generators and the run's record, all but times."""
    found, wanted = outcome(out), outcome(whole)
    assert any("lora_a" in name for name in wanted["state"])
    for part in wanted:
        assert found[part] == wanted[part], part


@pytest.mark.slow
def test_a_run_that_is_interrupted_anywhere_resumes_to_the_same_end(folder):
    out = folder / "out"
    run(folder, check=True)
    out.rename(folder / "whole")
    start = time.monotonic()
    first = run(folder, moment="thread:1:SIGINT")
    assert first.code == 130 and "after step 0. There is no checkpoint" in said(first)
    assert not steps(out)
    assert time.monotonic() - start < 60
    for moment, code, step in (
        ("rollout:3:SIGHUP", 129, 1),  # of step 2
        ("hang:3:SIGTERM", 143, 2),  # step 3, a reward that never returns
        ("update:2:SIGTERM", 143, 3),  # step 3, the first of two epochs (call 1 is a trial)
        ("rollout:2:SIGINT", 130, 4),  # of the evaluation behind step 4
    ):
        resume = [RESUME] if steps(out) else []
        done = run(folder, *resume, moment=moment)
        assert (done.code, steps(out)[-1]) == (code, step), (moment, done.err)
        again = "The same command goes on" if resume else "Set resume_from_checkpoint=auto to go on"
        assert f"after step {step}. {again} from there." in said(done)
        assert not (out / ".incomplete").exists()
    done = run(folder, RESUME, moment="save:1:SIGTERM")  # of the last step: all is done
    assert done.code == 0 and steps(out) == [1, 2, 3, 4, 5]
    check_same(out, folder / "whole")


@pytest.mark.slow
def test_two_ranks_leave_together(folder):
    out, three = folder / "out", ["num_steps=3", "max_generated_tokens=4"]
    run(folder, *three, ranks=2, check=True)
    out.rename(folder / "whole")
    for moment, step in (
        ("rollout:3:SIGTERM:1", 1),  # rank 1 alone gets it, as it begins
        ("hang:1:SIGTERM", 1),  # both hang, and both get it, as from torchrun
    ):
        done = run(folder, *three, *([RESUME] if steps(out) else []), moment=moment, ranks=2)
        # The launcher ends the others when the first has ended.
        codes = {each.code for each in done}
        assert 143 in codes and codes <= {143, -15}, [each.err[-3000:] for each in done]
        assert steps(out)[-1] == step and f"after step {step}." in said(done[0])
    run(folder, *three, RESUME, ranks=2, check=True)
    check_same(out, folder / "whole")


@pytest.mark.slow
def test_a_rank_ends_with_its_launcher(folder):
    """Also when torchrun is killed; test_distributed.py asks it to end."""
    more = [*QUICK, *ONE, "num_steps=9999", *NO_EVALUATION]
    launch = ["run", "--nproc_per_node", "1", DISTRIBUTED, "--config", CONFIG, *more]
    with in_background(tune, *launch, cwd=folder, check=False, PYTHONPATH=str(folder)) as done:
        assert wait_until(lambda: metrics(folder / "out"), 90)
        (launcher,) = done.processes()
        (rank,) = children(of=launcher)
        os.kill(launcher, signal.SIGKILL)
        assert done.result(25).code == -signal.SIGKILL
    try:
        assert wait_until(lambda: not is_alive(rank), 5)
    finally:
        if is_alive(rank):
            os.kill(rank, signal.SIGKILL)
