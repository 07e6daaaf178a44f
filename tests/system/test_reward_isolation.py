"""Rewards in processes of their own: real endless loops, real crashes, real kills."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import children, is_alive, wait_until

from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.sandbox.remote import ObjectLost, ObjectServer, RemoteObject
from torchtune_grpo.sandbox.worker import Function

# A reward that does as the completion says.
ACTOR = """
import asyncio, ctypes, decimal, os, re, signal, subprocess, sys, threading, time

class Actor:
    def __init__(self, folder, bonus=0.0):
        self.folder, self.bonus, self.calls = folder, bonus, 0

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        (text,) = completions
        if text == "loop":
            while True: pass
        if text == "regex":  # holds the interpreter's lock, so that no thread of it can help
            re.match("(a+)+$", "a" * 60 + "b")
        if text == "sleep": time.sleep(1000)
        if text == "work":
            end = time.process_time() + 0.4
            while time.process_time() < end: pass
            text = "1"
        if text == "raise": raise KeyError("mine")
        if text == "exit": os._exit(0)
        if text == "sysexit": sys.exit(3)
        if text == "segfault": ctypes.string_at(0)
        if text == "deaf":
            for number in range(1, 32):
                try: signal.signal(number, signal.SIG_IGN)
                except OSError: pass
            while True: pass
        if text == "family":
            # A child in a session of its own, whose own child is an orphan.
            code = "import os,time; os.fork() or os.setsid(); time.sleep(1000)"
            child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            grandchild = subprocess.Popen(["setsid", "sleep", "1000"])
            open(self.folder + "/pids", "w").write(f"{child.pid} {grandchild.pid} {os.getpid()}")
            time.sleep(1000)
        if text == "later":  # a thread keeps the interpreter's lock once this is answered
            hang = lambda: (time.sleep(0.02), re.match("(a+)+$", "a" * 60 + "b"))
            threading.Thread(target=hang, daemon=True).start()
            return [1.0]
        if text == "alarm": signal.signal(signal.SIGALRM, signal.SIG_IGN); text = "1.5"
        if text == "print": print("noise"); os.write(1, b"noise"); os.write(2, b"noise")
        if text == "nan": return [float("nan")]
        if text == "none": return [None]
        if text == "short": return []
        if text == "calls": return [self.calls]
        return [self.bonus + float(text)]

def environment(prompts, completions, **columns):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
    leaked = [n for n in names if n in os.environ]
    gpus, key = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_KEY"]
    return [1.0 if (leaked, gpus, key, "torch" in sys.modules) == ([], "", "kept", False) else 0.0]

async def waits(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric,
                **columns):
    await asyncio.sleep(0.001)
    log_extra("seen", list(answer))
    log_metric("tokens", len(completion_ids[0]))
    return [float(trainer_state.global_step + len(completion_ids[0]))]

def scaled(prompts, completions, factor, **columns):
    return [factor * float(completions[0])]

def make_scaled(factor):
    return lambda prompts, completions, **columns: [factor * float(completions[0])]

def longest(prompts, completions, **columns):
    if "raise" in completions: raise KeyError("mine")
    return [float(len(text) == max(map(len, completions))) for text in completions]

def decimals(prompts, completions, **columns):
    return [decimal.Decimal(text) for text in completions]

def chats(prompts, completions, **columns):
    return [float(completions[0][0]["content"])]
"""


@pytest.fixture
def actors(tmp_path, monkeypatch):
    """The folder of a user's file, as if it were the working folder."""
    (tmp_path / "actors.py").write_text(ACTOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield tmp_path
    sys.modules.pop("actors", None)


@pytest.fixture
def busy_core():
    """One core for this process, those that it starts, and four that do nothing else."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    os.sched_setaffinity(0, cores)
    for process in busy:
        process.kill()
        process.wait()


@pytest.fixture
def make(actors):
    """Builds sets of one isolated reward, and closes them."""
    made = []

    def build(name="Actor", *, share=1.0, seed=0, **node):
        if name == "Actor" and "_component_" not in node:
            node.setdefault("folder", str(actors))
        node = {"_component_": f"actors.{name}", "isolation": "process", "timeout": 0.5, **node}
        made.append(RewardSet.from_config([node], max_failure_share=share, seed=seed))
        return made[-1]

    yield build
    for rewards in made:
        rewards.close()
    assert not children()  # neither processes nor zombies


def score(rewards, *completions, **more):
    """Score completions of different prompts."""
    more = {"columns": {}, "prompts": [f"p{n}" for n in range(len(completions))], **more}
    return rewards(completions=list(completions), **more)


def test_waiting_for_a_cpu_is_not_the_rewards_time(make, busy_core):
    """0.4 s of work take 2 s, of which 0.4 count."""
    scores = make(timeout=1.0, workers=1)(prompts=[""], completions=["work"], columns={})
    assert scores.total.tolist() == [1.0]


@pytest.mark.slow
def test_each_way_to_fail_costs_one_sample(make):
    bad = "loop regex sleep raise exit sysexit segfault deaf nan print".split()
    texts = [text for name in bad for text in (name, "1.5")] + ["none", "alarm"]
    scores = score(make(workers=2, bonus=1.0), *texts)
    assert scores.failed[:, 0].tolist() == [text in bad for text in texts]
    values = scores.scores[:, 0]
    assert values.isnan().tolist() == [text in bad or text == "none" for text in texts]
    assert set(values[~values.isnan()].tolist()) == {2.5}


def test_a_group_is_scored_at_once(make):
    """As in process, for a reward that compares; one at a time where a completion makes it fail."""
    texts, prompts = ["a", "bbb", "cc", "dd", "e", "raise", "f"], ["p"] * 3 + ["q"] * 2 + ["r"] * 2
    scores = score(make("longest"), *texts, prompts=prompts)
    assert scores.scores[:5, 0].tolist() == [0, 1, 0, 1, 0]
    assert scores.failed[:, 0].tolist() == [text == "raise" for text in texts]


def test_the_error_is_told(make):
    said = r"first at index 1: RuntimeError: KeyError: 'mine' \(\w+\.py:\d+\)\. "
    with pytest.raises(RuntimeError, match=said):
        score(make(share=0.0), "1", "raise")
    with pytest.raises(RuntimeError, match="no answer within 0.5 s; its processes were killed"):
        score(make(share=0.0), "loop")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        score(make(share=0.0), "sysexit")
    with pytest.raises(ValueError, match="'Actor' returned 0 values for 1 completions"):
        score(make(), "short")


def test_a_kill_reaches_the_whole_family(make, actors):
    """Children in sessions of their own and orphans, while another worker's reward goes on."""
    rewards = make(workers=1)
    score(rewards, "1")
    (server,) = children()
    scores = score(rewards, "family", "2")
    assert scores.failed[:, 0].tolist() == [True, False]
    family = [int(pid) for pid in (actors / "pids").read_text().split()]
    assert len(family) == 3 and not any(is_alive(pid) for pid in family)
    (new,) = children()
    assert new != server and len(children(of=new)) == 1


def test_after_ctrl_c_no_worker_is_lost(make):
    """Also the idle one, which the next call would ask first."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        rewards = make(workers=2, timeout=60)
        score(rewards, "1", "1")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            score(rewards, "sleep")
        assert score(rewards, "1", "2", "3").scores[:, 0].tolist() == [1, 2, 3]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_workers_run_side_by_side_and_keep_their_state(make):
    rewards = make(workers=4, timeout=1)
    score(rewards, "1", "1", "1", "1")
    start = time.perf_counter()
    scores = score(rewards, *["sleep"] * 4)
    assert time.perf_counter() - start < 3
    assert scores.failed.all()
    scores = score(make(workers=1), "calls", "calls", "loop", "calls").scores[:, 0]
    assert scores.nan_to_num(-1).tolist() == [1, 2, -1, 1]  # the last in a new process


def test_a_request_that_nobody_takes_costs_one_sample(make):
    """The request is larger than a socket holds, and the worker cannot read it."""
    rewards = make(workers=1)
    assert score(rewards, "later").scores.tolist() == [[1.0]]
    large = {"text": ["x" * 2**22]}
    assert wait_until(lambda: score(rewards, "1", columns=large).failed.item())
    assert score(rewards, "2", columns=large).scores.tolist() == [[2.0]]


def test_a_worker_that_is_killed_with_a_request_unread_costs_one_sample(make):
    rewards = make(workers=1, timeout=60)
    score(rewards, "1")
    (server,) = children()
    (worker,) = children(of=server)
    os.kill(worker, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (worker, signal.SIGKILL)).start()
    assert score(rewards, "1", "2").failed[:, 0].tolist() == [True, False]


def test_an_object_that_is_lost_says_why_again(actors):
    """Rewards that raise are called again, and may ask an environment that was late."""
    server = ObjectServer()
    given = {"prompts": [""], "completions": ["sleep"]}
    late = RemoteObject(server, Function, "actors.Actor", {"folder": ""}, True, timeout=0.5)
    for _ in range(2):
        with pytest.raises(ObjectLost, match="no answer within 0.5 s"):
            late.call("call", None, given)
    server.close()


def test_what_workers_call(make):
    """Workers call what a factory makes, with messages or with an argument of the config."""
    assert score(make("make_scaled", factor=3), "2").total.tolist() == [6]
    assert score(make("chats", format="chat"), "2").total.tolist() == [2]
    assert score(make("decimals"), "0.5").total.tolist() == [0.5]  # as without a process
    scaled = make("scaled", factor=3)
    assert score(scaled, "2", columns={"factor": [100]}).total.tolist() == [6]


def test_workers_see_neither_rank_nor_gpu_nor_torch(make, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("LOCAL_KEY", "kept")
    assert score(make("environment"), "x").total.tolist() == [1.0]


def test_async_rewards_columns_and_notes_in_a_process(make):
    scores = score(
        make("waits", timeout=5),
        "a",
        "b",
        columns={"answer": [{"any": "thing"}, {7}]},
        completion_ids=[[1, 2], [3]],
        trainer_state=TrainerState(global_step=10, max_steps=20),
    )
    assert scores.total.tolist() == [12, 11]
    assert scores.extra == {"seen": [{"any": "thing"}, [7]]}  # JSON has no sets
    assert scores.metrics == [("waits/tokens", 2.0), ("waits/tokens", 1.0)]


DRAWS = """
import random
import numpy

def draws(prompts, completions, **columns):
    return [random.random() + numpy.random.rand()]
"""


def test_what_a_reward_draws_depends_on_seed_step_and_group_alone(make, actors):
    """Not on the process that it runs in, nor on other groups, nor on earlier calls."""
    (actors / "drawing.py").write_text(DRAWS)
    node = {"_component_": "drawing.draws", "timeout": 30}

    def drawn(*texts, seed=3, step=5, workers=1):
        state = TrainerState(global_step=step, max_steps=20)
        rewards = make(**node, seed=seed, workers=workers)
        given = {"prompts": [*texts], "trainer_state": state}  # each a group of its own
        return [score(rewards, *texts, **given).total.tolist() for _ in range(2)]

    first, again = drawn("a", "b", "c")
    assert first == again == drawn("a", "b", "c", workers=3)[0] and len({*first}) == 3
    assert drawn("c", "a")[0] == [first[2], first[0]]
    assert drawn("a", seed=4)[0] != first[:1] != drawn("a", step=6)[0]


def test_a_component_that_loads_only_here_is_told(make, actors):
    rewards = make()
    (actors / "actors.py").write_text("raise ImportError('not here')")
    with pytest.raises(ValueError, match="(?s)actors.Actor cannot be loaded .*not here"):
        score(rewards, "1")


def test_a_killed_server_is_replaced(make):
    rewards = make(workers=1)
    score(rewards, "1")
    (server,) = children()
    (worker,) = children(of=server)
    os.kill(server, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(worker))
    assert score(rewards, "1", "2").failed[:, 0].tolist() == [True, False]
