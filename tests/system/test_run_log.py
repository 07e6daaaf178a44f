"""The run's own record: killed anywhere, torn anywhere, and given anything."""

import datetime
import enum
import gc
import json
import math
import sys
import tracemalloc
from dataclasses import replace

import numpy
import pytest
import torch
from kill_points import disk_of, kill_points
from omegaconf import OmegaConf
from steps import make_scores, make_trajectory

from torchtune_grpo.monitor.groups import GroupRecorder
from torchtune_grpo.monitor.jsonl import read_jsonl
from torchtune_grpo.monitor.metric_logger import make_metric_logger
from torchtune_grpo.monitor.run_log import RunLog
from torchtune_grpo.rewards.call import MEASURED, Outcome
from torchtune_grpo.rewards.workers import ContractError

FILES = ["completions.jsonl", "metrics.jsonl"]


def groups(scores, step=1):
    """The records of one group of two completions."""
    recorder = GroupRecorder(
        num_groups=1,
        group_size=2,
        accuracy_reward=None,
        stop_tokens=(1,),
        max_generated_tokens=3,
        seed=0,
    )
    recorder.scored(make_trajectory(), scores)
    return recorder.take(step)[0]


def record(folder, *steps):
    """Two completions and one line of metrics a step."""
    log = RunLog(folder)
    for step in steps:
        scores = replace(make_scores(), extra={"note": ["ü €"] * 4})
        log.groups(step, groups(scores, step), share=1.0)
        log.metrics(step, {"reward": step / 3, "€": 1.0})


def history(folder):
    """The steps of the completions and of the metrics."""
    return [[each["step"] for each in read_jsonl(folder / name)] for name in FILES]


def resume(folder, step):
    RunLog(folder).keep_until(step)


def check_history(folder, *steps):
    """Exactly these steps, in whole lines, and no other file."""
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert history(folder) == [[step for step in steps for _ in range(2)], [*steps]]
    for name in FILES:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=pytest.fail)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_resume_that_is_killed_anywhere_loses_nothing(tmp_path, folder, step):
    record(tmp_path, 1, 2, 3)
    sizes = range(1, (tmp_path / FILES[0]).stat().st_size, 97) if step == 3 else ()
    for where in kill_points(
        lambda: resume(folder, step),
        folder=folder,
        prepare=lambda: record(folder, 1, 2, 3),
        sizes=sizes,
    ):
        for kept in map(set, history(folder)):
            assert kept in ({1, 2, 3}, set(range(1, step + 1))), where
        resume(folder, step)
        check_history(folder, *range(1, step + 1))


def test_a_step_that_is_killed_anywhere_leaves_the_others(tmp_path, folder):
    """At every seventh byte of its lines, which is in the middle of a character, too."""
    record(tmp_path, 1, 2)
    before = (tmp_path / FILES[0]).stat().st_size
    record(tmp_path, 3)
    for _ in kill_points(
        lambda: record(folder, 3),
        folder=folder,
        prepare=lambda: record(folder, 1, 2),
        sizes=range(before, (tmp_path / FILES[0]).stat().st_size, 7),
    ):
        resume(folder, 2)
        check_history(folder, 1, 2)
        record(folder, 3)
        check_history(folder, 1, 2, 3)


def test_torn_lines_are_left_out_and_said_once(folder, caplog):
    record(folder, 1, 2)
    path = folder / FILES[1]
    lines = path.read_bytes()
    torn = lines[: lines.rindex("€".encode()) + 1]
    with pytest.raises(UnicodeDecodeError):
        torn.decode()
    noise = b'{"reward": 1}\n[1]\n7\n\xff\x00\n{"step": "1"}\n' + b"[" * 100_000 + b"\n"
    path.write_bytes(noise + torn)
    assert [each["step"] for each in read_jsonl(path)] == [1]
    caplog.clear()
    resume(folder, 2)
    (message,) = caplog.messages
    assert f"{path}: left out 7 line(s)" in message
    assert [each["step"] for each in read_jsonl(path)] == [1]
    caplog.clear()
    resume(folder, 2)
    assert not caplog.messages  # they are gone


def test_a_last_line_without_its_end_is_whole(folder):
    record(folder, 1, 2)
    path = folder / FILES[1]
    path.write_bytes(path.read_bytes()[:-1])
    resume(folder, 2)
    record(folder, 3)
    check_history(folder, 1, 2, 3)


def test_a_full_disk_ends_the_run_and_the_next_one_resumes(folder):
    record(folder, 1, 2)
    size = (folder / FILES[1]).stat().st_size + 40
    with disk_of(size), pytest.raises(OSError, match="File too large"):
        RunLog(folder).metrics(3, {"€" * 20: 1.0})
    assert (folder / FILES[1]).stat().st_size == size
    resume(folder, 2)
    check_history(folder, 1, 2)


def test_a_large_record_is_not_read_whole(folder):
    folder.mkdir()
    line = json.dumps({"step": 1, "completion": "x" * 10_000}) + "\n"
    for name in FILES:
        (folder / name).write_text(line * 2000)  # 20 MB
    tracemalloc.start()
    resume(folder, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6
    assert (folder / FILES[0]).read_text() == line * 2000


def test_completions_are_whole_groups_and_bounded(folder):
    """Half of a run may fill half of 64 MiB and 1 MiB more; nobody cuts a group."""
    log = RunLog(folder)
    group = [{"completion": "x" * 400_000}] * 2
    for step in (1, 2, 80, 100):
        log.groups(step, [group] * 90, share=step / 100)
    lines = read_jsonl(folder / FILES[0])
    kept = [sum(line["step"] == step for line in lines) for step in (1, 2, 80, 100)]
    lengths = {len(line) for line in (folder / FILES[0]).read_bytes().splitlines(True)}
    size = max(lengths)
    for step, after in zip((1, 2, 80, 100), (sum(kept[: n + 1]) for n in range(4)), strict=True):
        allowed = 2**20 + step / 100 * 64 * 2**20
        assert after % 2 == 0 and allowed - 2 * size < after * size <= allowed + 100
    assert (folder / FILES[0]).stat().st_size < 66 * 2**20


def test_num_tokens_are_those_of_the_run_also_after_a_resume(folder):
    log = RunLog(folder)
    assert [log.metrics(step, {"num_tokens": 10.0})["num_tokens"] for step in (1, 2)] == [10, 20]
    assert log.metrics(2, {"eval/accuracy": 1.0}) == {"eval/accuracy": 1.0}
    resumed = RunLog(folder)
    resumed.keep_until(1)
    resumed.metrics(2, {"num_tokens": 5.0})
    assert [line["num_tokens"] for line in resumed.read_metrics()] == [10, 15]


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ({"_component_": "TensorBoardLogger", "log_dir": "logs"}, "pip install tensorboard"),
        ({"_component_": "WandBLogger"}, "pip install wandb"),
        ({"_component_": "DiskLogger", "log_dir": "/dev/null/logs"}, "a folder that can be writ"),
    ],
)
def test_a_metric_logger_that_cannot_be_made(logger, message, monkeypatch):
    """One error, and nothing of what fails when half of a logger is deleted."""
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    stray = []
    monkeypatch.setattr(sys, "unraisablehook", hook := stray.append)
    path = f"torchtune.training.metric_logging.{logger['_component_']}"
    with pytest.raises(ValueError, match=f"metric_logger={path}: .*{message}"):
        make_metric_logger(OmegaConf.create(logger | {"_component_": path}))
    gc.collect()
    assert not stray and sys.unraisablehook is hook


class Color(enum.IntEnum):
    RED = 1


class Hostile:
    def __init__(self, error):
        self.error = error

    def __str__(self):
        raise self.error

    __repr__ = __str__

    @property
    def tolist(self):
        raise self.error


class HostileText(str):
    def __str__(self):
        raise SystemExit

    __repr__ = encode = __str__


itself = [1]
itself.append(itself)
deep = []
for _ in range(100_000):
    deep = [deep]

# What a reward may give to log_extra -> what the file says; None = any text.
VALUES = {
    "dict": ({"a": [1, None, True], 2: "b"}, {"a": [1, None, True], "2": "b"}),
    "tuple keys": ({(1, 2): {(3,): 4}}, {"(1, 2)": {"(3,)": 4}}),
    "set": ({7}, [7]),
    "not finite": ([math.nan, math.inf, -math.inf, 1.5], [None, None, None, 1.5]),
    "tensor": (torch.tensor([[1.0, math.nan]], dtype=torch.bfloat16), [[1.0, None]]),
    "no values": (torch.ones(2, device="meta"), None),
    "array": (numpy.arange(2), [0, 1]),
    "numpy scalars": ([numpy.float32(0.5), numpy.float64("nan"), numpy.int8(1)], [0.5, None, 1]),
    "huge": ([10**5000, -(2**64), 2**63 - 1], [hex(10**5000), hex(-(2**64)), 2**63 - 1]),
    "enum": (Color.RED, 1),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "bytes": (b"\xff", "b'\\xff'"),
    "surrogate": ("\ud800 \udcff", "\ud800 \udcff"),
    "line ends": ("a\nb\u2028\x85", "a\nb\u2028\x85"),
    "no text": (Hostile(ValueError()), "<Hostile>"),
    "exits": ([Hostile(SystemExit(0)), 1], ["<Hostile>", 1]),
    "exits as key": ({HostileText("a"): HostileText("b")}, {"<HostileText>": "b"}),
    "function": (lambda: None, None),
    "in itself": (itself, None),
    "deep": (deep, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_whatever_a_reward_logs_is_valid_json(folder, name):
    value, expected = VALUES[name]
    notes = Outcome(4)
    notes.log_extra("note", [value] * 4)
    log = RunLog(folder)
    log.groups(1, groups(replace(make_scores(), extra=notes.extra)), share=1.0)
    lines = (folder / FILES[0]).read_bytes().decode().removesuffix("\n").split("\n")
    assert len(lines) == 2
    for line in lines:
        got = json.loads(line, parse_constant=pytest.fail)["extra"]["note"]
        assert got == expected if expected is not None else got
    log.keep_until(1)
    assert len(read_jsonl(folder / FILES[0])) == 2


def test_totals_beyond_float32_and_a_metric_called_step(folder):
    log = RunLog(folder)
    total = torch.full((4,), math.inf)
    log.groups(1, groups(replace(make_scores(), total=total)), share=1.0)
    log.metrics(1, {"step": 9.0, "kl": math.nan})
    log.keep_until(1)
    assert read_jsonl(folder / FILES[0])[0]["reward"] is None
    assert read_jsonl(folder / FILES[1]) == [{"step": 1, "kl": None}]


def test_names_of_the_run_are_refused():
    notes = Outcome(1)
    for name in MEASURED:
        for said in (name, f"b/{name}"):  # of a reward "a/b"
            with pytest.raises(ContractError, match=rf"log_metric\('{said}', .*mean, .*another"):
                notes.log_metric(said, 1.0)
    assert not notes.metrics
